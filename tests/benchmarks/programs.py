"""What the tests of the programs that measure share."""

from collections.abc import Callable

import pytest


def assert_ends_in_one_line(
    main: Callable[[list[str]], int], name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that these arguments end the program with its usage and one line that starts with the message."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)

    usage, error = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert usage == f"usage: {name} [options]"
    assert error.startswith(f"{name}: error: {message}")
