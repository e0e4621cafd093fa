"""Settings: from the environment, in the process, and in a block."""

import re

import pytest

import jax_grouped as jg
from jax_grouped.core import config


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict.fromkeys(("1", "True", "ON", "yes"), True) | dict.fromkeys(("0", "FALSE", "off", "No", "", " "), False)
    for text, value in texts.items():
        monkeypatch.setenv("JAX_GROUPED_CHECK", text)
        assert config.from_environment.__wrapped__().check is value
    flags = "JAX_GROUPED_CHECK must be 0 or 1, false or true, off or on, no or yes, got {!r}."
    backends = "backend (JAX_GROUPED_BACKEND) must be one of ('auto', 'xla'), got {!r}."
    bad = [("JAX_GROUPED_CHECK", text, flags) for text in ("maybe", "2", "-1", "tru")]
    for variable, text, message in (*bad, ("JAX_GROUPED_BACKEND", "gpu", backends)):
        monkeypatch.setenv("JAX_GROUPED_CHECK", "")
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"^{re.escape(message.format(text))}$"):
            config.from_environment.__wrapped__()


def test_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'chek'"):
        jg.config.chek = True  # type: ignore[attr-defined]  # Type checkers refuse it too.


def test_a_flag_is_true_or_false() -> None:
    for value in ("no", 1, None):
        message = f"^check must be True or False, got {re.escape(repr(value))}.$"
        with pytest.raises(TypeError, match=message):
            jg.config.check = value
        if value is not None:  # None leaves a setting as it is.
            with pytest.raises(TypeError, match=message), jg.config.override(check=value):
                pass


def test_the_settings_are_printed_with_those_that_an_override_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.from_environment().__class__(backend="xla", check=False)
    monkeypatch.setattr(config, "from_environment", lambda: settings)
    printed, process = config.Config(), "backend='xla', check=False, batch_invariant=False"
    assert repr(printed) == f"<jax_grouped.config: {process}>"
    with printed.override(check=True):
        assert (
            repr(printed) == f"<jax_grouped.config: {process.replace('False', 'True', 1)}, by override; "
            f"the process has {process}>"
        )
