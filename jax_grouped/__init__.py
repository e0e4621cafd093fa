"""Grouped matmuls for mixture-of-experts training in JAX, at the speed of the hardware."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from jax_grouped import moe
from jax_grouped.core.config import config
from jax_grouped.fp8.arrays import GroupedQuantized, KernelCache, ScaledArray
from jax_grouped.fp8.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    ScalingMode,
)
from jax_grouped.fp8.state import Fp8State
from jax_grouped.kernels.activations import SwiGLU
from jax_grouped.kernels.primitive import CUSTOM_CALL_TARGETS, load_extension
from jax_grouped.ops.dense import (
    CHECKPOINT_NAMES,
    OUTPUT_NAME,
    DenseResiduals,
    PendingWgrad,
    grouped_dense,
    grouped_dense_dgrad,
    grouped_dense_fwd,
    grouped_dense_wgrad,
)
from jax_grouped.ops.gradients import accumulate_gradients, apply_updates, overwrite_with_gradient, reduce_gradients
from jax_grouped.ops.inputs import Lora
from jax_grouped.ops.quantize import grouped_dequantize, grouped_quantize, quantize_kernel
from jax_grouped.ops.ragged_dot import ragged_dot, ragged_dot_general, scaled_ragged_dot

if TYPE_CHECKING:
    from jax_grouped import linen as linen
    from jax_grouped import nnx as nnx

# Register the custom calls at import: an exported program may run before any operation of the library is lowered. A
# broken extension is reported when a GPU needs it; everything else works without it.
with contextlib.suppress(ImportError):
    load_extension()

try:
    __version__ = importlib.metadata.version("jax_grouped")
except importlib.metadata.PackageNotFoundError:
    # The package is imported from its sources and not installed. Every parser accepts this version and sorts it lowest.
    __version__ = "0+unknown"

__all__ = [
    "CHECKPOINT_NAMES",
    "CUSTOM_CALL_TARGETS",
    "OUTPUT_NAME",
    "DelayedScaling",
    "DenseResiduals",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Fp8State",
    "GroupedQuantized",
    "KernelCache",
    "Lora",
    "MXFP8BlockScaling",
    "PendingWgrad",
    "Recipe",
    "ScaledArray",
    "ScalingMode",
    "SwiGLU",
    "accumulate_gradients",
    "apply_updates",
    "config",
    "grouped_dense",
    "grouped_dense_dgrad",
    "grouped_dense_fwd",
    "grouped_dense_wgrad",
    "grouped_dequantize",
    "grouped_quantize",
    "moe",
    "overwrite_with_gradient",
    "quantize_kernel",
    "ragged_dot",
    "ragged_dot_general",
    "reduce_gradients",
    "scaled_ragged_dot",
]


def __getattr__(name: str) -> ModuleType:
    # Imported on first use: the layers need Flax, the operations do not.
    if name in ("linen", "nnx"):
        return importlib.import_module(f"jax_grouped.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    layers = ["linen", "nnx"] if importlib.util.find_spec("flax") else []
    return sorted([*__all__, *layers, "__version__"])
