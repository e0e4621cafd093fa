"""Settings: from the environment, in the process, and in a block."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

import jax_grouped as jg
from jax_grouped.core import config


def from_environment(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> Any:
    monkeypatch.setenv(variable, text)
    return config.from_environment.__wrapped__()


def test_flags_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict.fromkeys(("1", "true", "True", "ON", "yes"), True)
    texts |= dict.fromkeys(("0", "false", "FALSE", "off", "No", "", " "), False)
    for text, value in texts.items():
        assert from_environment(monkeypatch, "JAX_GROUPED_CHECK", text).check is value
    for text in ("maybe", "2", "-1", "tru"):
        message = f"JAX_GROUPED_CHECK must be 0 or 1, false or true, off or on, no or yes, got {text!r}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            from_environment(monkeypatch, "JAX_GROUPED_CHECK", text)


def test_a_bad_variable_is_an_error_of_the_first_operation() -> None:
    environment = os.environ | {"JAX_GROUPED_CHECK": "maybe"}
    program = "import jax_grouped as jg, jax.numpy as jnp; jg.ragged_dot(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), [2])"
    command = [sys.executable, "-c", program]
    program = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert program.returncode == 1
    assert program.stderr.splitlines()[-1].startswith("ValueError: JAX_GROUPED_CHECK must be 0 or 1, ")


@pytest.mark.parametrize(("name", "hint"), [("chek", " Did you mean check?"), ("zzz", "")])
def test_a_misspelt_setting_is_an_error(name: str, hint: str) -> None:
    message = f"jax_grouped.config has no attribute {name!r}; its settings are backend, check.{hint}"
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        setattr(jg.config, name, True)
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        getattr(jg.config, name)


def test_a_flag_is_true_or_false() -> None:
    for value in ("no", 1, None):
        message = f"^check must be True or False, got {re.escape(repr(value))}.$"
        with pytest.raises(TypeError, match=message):
            jg.config.check = value
        if value is not None:  # None leaves a setting as it is.
            with pytest.raises(TypeError, match=message), jg.config.override(check=value):
                pass


def test_the_settings_are_printed_with_those_that_an_override_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("backend", "xla"), ("check", False)):
        monkeypatch.setattr(jg.config, name, value)
    process = "backend='xla', check=False"
    assert repr(jg.config) == f"<jax_grouped.config: {process}>"
    with jg.config.override(check=True):
        shown = "backend='xla', check=True, by override"
        assert repr(jg.config) == f"<jax_grouped.config: {shown}; the process has {process}>"
