"""Grouped matmuls for mixture-of-experts training in JAX, at the speed of the hardware."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from jax_grouped import moe as moe
from jax_grouped.core.config import config as config
from jax_grouped.fp8.arrays import GroupedQuantized as GroupedQuantized
from jax_grouped.fp8.arrays import KernelCache as KernelCache
from jax_grouped.fp8.arrays import ScaledArray as ScaledArray
from jax_grouped.fp8.recipes import DelayedScaling as DelayedScaling
from jax_grouped.fp8.recipes import Float8BlockScaling as Float8BlockScaling
from jax_grouped.fp8.recipes import Float8CurrentScaling as Float8CurrentScaling
from jax_grouped.fp8.recipes import MXFP8BlockScaling as MXFP8BlockScaling
from jax_grouped.fp8.recipes import Recipe as Recipe
from jax_grouped.fp8.recipes import ScalingMode as ScalingMode
from jax_grouped.fp8.state import Fp8State as Fp8State
from jax_grouped.kernels import extension
from jax_grouped.kernels.activations import SwiGLU as SwiGLU
from jax_grouped.kernels.primitive import CUSTOM_CALL_TARGETS as CUSTOM_CALL_TARGETS
from jax_grouped.ops.dense import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from jax_grouped.ops.dense import OUTPUT_NAME as OUTPUT_NAME
from jax_grouped.ops.dense import DenseResiduals as DenseResiduals
from jax_grouped.ops.dense import PendingWgrad as PendingWgrad
from jax_grouped.ops.dense import grouped_dense as grouped_dense
from jax_grouped.ops.gradients import accumulate_gradients as accumulate_gradients
from jax_grouped.ops.gradients import apply_updates as apply_updates
from jax_grouped.ops.gradients import overwrite_with_gradient as overwrite_with_gradient
from jax_grouped.ops.gradients import reduce_gradients as reduce_gradients
from jax_grouped.ops.quantize import grouped_dequantize as grouped_dequantize
from jax_grouped.ops.quantize import grouped_quantize as grouped_quantize
from jax_grouped.ops.quantize import quantize_kernel as quantize_kernel
from jax_grouped.ops.ragged_dot import ragged_dot as ragged_dot
from jax_grouped.ops.ragged_dot import ragged_dot_general as ragged_dot_general
from jax_grouped.ops.ragged_dot import scaled_ragged_dot as scaled_ragged_dot
from jax_grouped.ops.split import grouped_dense_dgrad as grouped_dense_dgrad
from jax_grouped.ops.split import grouped_dense_fwd as grouped_dense_fwd
from jax_grouped.ops.split import grouped_dense_wgrad as grouped_dense_wgrad

if TYPE_CHECKING:
    from jax_grouped import linen as linen
    from jax_grouped import nnx as nnx

# Register the custom calls at import: an exported program may run before any operation of the library is lowered. A
# broken extension is reported when a GPU needs it; everything else works without it.
with contextlib.suppress(ImportError):
    extension.load()

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
