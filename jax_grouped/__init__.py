"""Grouped matmuls for mixture-of-experts training in JAX, at the speed of the hardware."""

import contextlib
import importlib
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING

from jax_grouped._config import config as config
from jax_grouped.backends import extension
from jax_grouped.backends.cuda import CUSTOM_CALL_TARGETS as CUSTOM_CALL_TARGETS
from jax_grouped.dense import grouped_dense as grouped_dense
from jax_grouped.matmul import ragged_dot as ragged_dot

if TYPE_CHECKING:
    from jax_grouped import linen as linen

# An exported program may run without anything of ours being lowered first, so its custom calls are registered right
# away. An extension that is broken is reported when a GPU needs it: everything else works without.
with contextlib.suppress(ImportError):
    extension.load()

__version__ = importlib.metadata.version("jax_grouped")

__all__ = ["CUSTOM_CALL_TARGETS", "config", "grouped_dense", "ragged_dot"]


def __getattr__(name: str) -> ModuleType:
    # The layers need Flax, which the operations do not.
    if name == "linen":
        return importlib.import_module("jax_grouped.linen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
