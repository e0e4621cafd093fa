"""Arguments that functions refuse."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def assert_refused(
    function: Callable[..., Any], arguments: Mapping[str, Any], refused: Mapping[str, Mapping[str, Any]]
) -> None:
    """Calls a function with each of the changed arguments, and compares how its error begins with the key."""
    for message, changed in refused.items():
        try:
            function(**{**arguments, **changed})
        except (TypeError, ValueError, NotImplementedError) as error:
            text = str(error)
            # A key that is a whole sentence is the whole message.
            assert text == message if message.endswith(".") else text.startswith(message), f"{text}\nnot: {message}"
        else:
            pytest.fail(f"accepted, without the error: {message}")
