"""Lowered programs, and functions that read them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def struct(shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(function: Callable[..., Any], *arguments: Any, platform: str = "cuda") -> str:
    """Returns the program's text for a platform that need not be here."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text: str, target: str = "jax_grouped") -> list[str]:
    """Returns the lines that call kernels of the library, with such a name."""
    return [line for line in text.splitlines() if f"stablehlo.custom_call @{target}" in line]


def products(text: str) -> list[str]:
    """Returns the grouped products of a program, in its order."""
    return [("fprop", "dgrad", "wgrad")[int(index)] for index in re.findall(r"product = (\d) : i32", text)]


def types(call: str) -> tuple[list[str], list[str]]:
    """Returns the types of a custom call's operands and results."""
    operands, results = call.rsplit(" : (", 1)[1].split(") -> ")
    return re.findall(r"tensor<(\S+)>", operands), re.findall(r"tensor<(\S+)>", results)
