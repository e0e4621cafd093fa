"""Flax linen layers."""

from jax_grouped._layers import MoEInitializers as MoEInitializers
from jax_grouped._layers import default_kernel_init as default_kernel_init

try:
    import flax.linen  # noqa: F401  # The modules below import it; here its absence has a clear error.
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.linen needs Flax: python3 -m pip install "flax>=0.12"') from error

from jax_grouped.linen.dense import KERNEL_CACHE as KERNEL_CACHE
from jax_grouped.linen.dense import GroupedDense as GroupedDense
from jax_grouped.linen.dense import GroupedKernel as GroupedKernel
from jax_grouped.linen.inference import quantize_for_inference as quantize_for_inference
from jax_grouped.linen.moe import ROUTER_STATE as ROUTER_STATE
from jax_grouped.linen.moe import MoEMlp as MoEMlp

__all__ = [
    "KERNEL_CACHE",
    "ROUTER_STATE",
    "GroupedDense",
    "GroupedKernel",
    "MoEInitializers",
    "MoEMlp",
    "default_kernel_init",
    "quantize_for_inference",
]


def __dir__() -> list[str]:
    return sorted(__all__)
