"""Flax NNX layers."""

from jax_grouped._layers import MoEInitializers as MoEInitializers
from jax_grouped._layers import default_kernel_init as default_kernel_init

try:
    from flax import nnx  # noqa: F401  # The modules below import it; here its absence has a clear error.
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.nnx needs Flax: python3 -m pip install "flax>=0.12"') from error

from jax_grouped.nnx.dense import TRAINED as TRAINED
from jax_grouped.nnx.dense import Fp8Variable as Fp8Variable
from jax_grouped.nnx.dense import GroupedDense as GroupedDense
from jax_grouped.nnx.dense import GroupedKernel as GroupedKernel
from jax_grouped.nnx.dense import KernelCacheVariable as KernelCacheVariable
from jax_grouped.nnx.moe import MoEMlp as MoEMlp
from jax_grouped.nnx.moe import SelectionBias as SelectionBias
from jax_grouped.nnx.variables import linen_variables as linen_variables
from jax_grouped.nnx.variables import load_variables as load_variables
from jax_grouped.nnx.variables import quantize_for_inference as quantize_for_inference

__all__ = [
    "TRAINED",
    "Fp8Variable",
    "GroupedDense",
    "GroupedKernel",
    "KernelCacheVariable",
    "MoEInitializers",
    "MoEMlp",
    "SelectionBias",
    "default_kernel_init",
    "linen_variables",
    "load_variables",
    "quantize_for_inference",
]


def __dir__() -> list[str]:
    return sorted(__all__)
