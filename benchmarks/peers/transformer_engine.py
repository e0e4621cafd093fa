"""TransformerEngine for JAX: `grouped_dense` without quantization, and `grouped_quantize`."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case, quantization_arguments
from benchmarks.peers import JaxWork, NotOfferedError, jax_layers

_dense: Any = importlib.import_module("transformer_engine.jax.dense")
_quantize: Any = importlib.import_module("transformer_engine.jax.quantize")
_extensions: Any = importlib.import_module("transformer_engine.jax.cpp_extensions")

#: By the first word of an operation; it has no block scaling but that of MX, which needs Blackwell.
_MODES = {"delayed": "DELAYED_TENSOR_SCALING", "current": "CURRENT_TENSOR_SCALING", "mx": "MXFP8_1D_SCALING"}


@jax_layers.find_layer
def _layer(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return _dense.grouped_dense(x, kernel.astype(x.dtype), sizes)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    case.require_all_rows()
    return jax_layers.layer_work(case, sets, _layer)


def quantization(case: Case, sets: list[Arrays]) -> JaxWork:
    name = _MODES.get(case.operation.split()[0])
    if name is None:
        raise NotOfferedError
    case.require_all_rows()
    mode = getattr(_quantize.ScalingMode, name)
    supported, reason = _quantize.is_scaling_mode_supported(mode)
    if not supported:
        raise ValueError(reason)
    layout = _quantize.QuantizeLayout.ROWWISE_COLWISE if "both" in case.operation else _quantize.QuantizeLayout.ROWWISE

    def run(sizes: jax.Array, scale: jax.Array | None, x: jax.Array) -> list[jax.Array]:
        # Made anew in every trace: quantizers keep what they are given, and that would outlive it.
        quantizer = _quantize.QuantizerFactory.create(
            scaling_mode=mode, q_dtype=jnp.float8_e4m3fn, q_layout=layout, n_groups=case.shape.num_groups
        )
        if scale is not None:
            # One operand for all of them; as one each, dispatching them would take longer than the kernels.
            for group, quantizer_of_group in enumerate(quantizer.quantizers):
                quantizer_of_group.scale = scale[group : group + 1]
        quantized = _extensions.grouped_quantize(x, quantizer, sizes)
        # Without the group sizes, which come back as they are. The next step's scales are not computed.
        return [array for array in jax.tree.leaves(quantized) if array is not sizes]

    return JaxWork(run, quantization_arguments(case, sets))
