"""The implementations that are measured. Each loads its library only when asked for."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_grouped as jg
from benchmarks.jax_work import JaxWork, Results
from benchmarks.peers import OURS
from benchmarks.quantize import plain
from benchmarks.quantize.cases import CASES, Case, Quantization
from benchmarks.timing import Work
from jax_grouped.__main__ import choose_backend


class Peer(NamedTuple):
    """An implementation.

    Attributes:
        prepare: makes a program for a case; raises if it can't.
        backend: what its programs run on.
        quantizations: those that it has at all; of others there is no row.
    """

    prepare: Callable[[Case], Work]
    backend: str
    quantizations: frozenset[Quantization]


def _work(program: Callable[..., Results], case: Case) -> JaxWork:
    """Calls of `program(x, scale, activation_input, group_sizes)`."""
    sizes = jnp.asarray(case.sizes)
    return JaxWork(program, [(*inputs, sizes) for inputs in case.inputs])


def load_jax_grouped() -> Peer:
    """`jax_grouped.grouped_quantize`, `quantize_kernel` and `grouped_dequantize`."""
    return Peer(_prepare_ours, choose_backend()[0], frozenset(CASES.values()))


def _prepare_ours(case: Case) -> Work:
    if not case.quantization.inverse:
        return _work(_ours(case.quantization), case)
    quantize = jax.jit(functools.partial(_quantize, case.quantization))
    quantized = [quantize(*inputs, jnp.asarray(case.sizes)) for inputs in case.inputs]
    return JaxWork(_dequantize, [(pair.rowwise or pair.columnwise,) for pair in quantized])


# One function for each, so that JAX compiles it once for all group sizes.
@functools.cache
def _ours(quantization: Quantization) -> Callable[..., Results]:
    def run(*operands: Any) -> Results:
        result = _quantize(quantization, *operands)
        arrays = [getattr(result, name, None) for name in ("amax", "dbias")]
        for scaled in (result.rowwise, result.columnwise):
            if scaled is not None:
                arrays += [scaled.data, scaled.scale_inv]
        return tuple(array for array in arrays if array is not None)

    return run


def _quantize(
    quantization: Quantization,
    x: jax.Array,
    scale: jax.Array | None,
    activation_input: jax.Array | None,
    group_sizes: jax.Array,
) -> jg.GroupedQuantized | jg.KernelCache:
    if quantization.kernels:
        stack = x.reshape(group_sizes.shape[0], -1, x.shape[1])
        return jg.quantize_kernel(stack, jg.Float8BlockScaling())
    return jg.grouped_quantize(
        x,
        group_sizes,
        quantization.mode,
        rowwise=quantization.rowwise,
        columnwise=quantization.columnwise,
        scale=scale,
        dbias=quantization.dbias,
        activation=quantization.activation,
        activation_input=activation_input,
    )


def _dequantize(scaled: jg.ScaledArray) -> Results:
    return (jg.grouped_dequantize(scaled, jnp.bfloat16),)


def _named(*names: str) -> frozenset[Quantization]:
    return frozenset(CASES[name] for name in names)


def load_plain() -> Peer:
    """The same formulas in plain `jax.numpy`, compiled by XLA."""
    quantizations = _named("block_1d rowwise", "block_1d both", "delayed tensor rowwise", "current tensor rowwise")
    return Peer(_prepare_plain, "xla", quantizations)


def _prepare_plain(case: Case) -> Work:
    _require_all_rows(case)
    if case.quantization.mode == jg.ScalingMode.BLOCK_1D:
        if case.shape.features % plain.BLOCK:
            raise ValueError("needs features that are a multiple of 128")
        if case.quantization.columnwise and (len(set(case.sizes.tolist())) > 1 or case.sizes[0] % plain.BLOCK):
            raise ValueError("needs equal groups with a multiple of 128 rows")
    return _work(_plain(case.quantization), case)


@functools.cache
def _plain(quantization: Quantization) -> Callable[..., Results]:
    def run(x: jax.Array, scale: jax.Array | None, activation_input: None, group_sizes: jax.Array) -> Results:
        del activation_input
        if quantization.mode == jg.ScalingMode.TENSOR:
            return plain.tensor_rowwise(x, scale, group_sizes)
        results = plain.block_1d_rowwise(x)
        if quantization.columnwise:
            results += plain.block_1d_columnwise(x, group_sizes.shape[0])
        return results

    return run


def _require_all_rows(case: Case) -> None:
    if case.sizes.sum() != case.shape.tokens:
        raise ValueError("needs every row to belong to a group")


def load_transformer_engine() -> Peer:
    """TransformerEngine's `grouped_quantize` for JAX, which has no block scaling but that of MX."""
    quantizations = _named(
        "delayed tensor rowwise", "delayed tensor both", "current tensor rowwise", "current tensor both", "mx both"
    )
    quantize = importlib.import_module("transformer_engine.jax.quantize")
    grouped_quantize = importlib.import_module("transformer_engine.jax.cpp_extensions").grouped_quantize
    prepare = functools.partial(_prepare_transformer_engine, quantize, grouped_quantize)
    return Peer(prepare, "transformer_engine", quantizations)


def _prepare_transformer_engine(quantize: Any, grouped_quantize: Callable[..., Any], case: Case) -> Work:
    _require_all_rows(case)
    quantization, modes, layouts = case.quantization, quantize.ScalingMode, quantize.QuantizeLayout
    if quantization.mode == jg.ScalingMode.MX:
        mode = modes.MXFP8_1D_SCALING
    else:
        mode = modes.DELAYED_TENSOR_SCALING if quantization.given_scale else modes.CURRENT_TENSOR_SCALING
    supported, reason = quantize.is_scaling_mode_supported(mode)
    if not supported:
        raise ValueError(reason)

    def run(x: jax.Array, scale: jax.Array | None, activation_input: None, group_sizes: jax.Array) -> Results:
        del activation_input
        # Made anew in every trace: quantizers keep what they are given, and that would outlive it.
        quantizer = quantize.QuantizerFactory.create(
            scaling_mode=mode,
            q_dtype=jnp.float8_e4m3fn,
            q_layout=layouts.ROWWISE_COLWISE if quantization.columnwise else layouts.ROWWISE,
            n_groups=case.shape.num_groups,
        )
        if scale is not None:
            # One operand for all of them; as one each, dispatching them would take longer than the kernels.
            for group, quantizer_of_group in enumerate(quantizer.quantizers):
                quantizer_of_group.scale = scale[group : group + 1]
        quantized = grouped_quantize(x, quantizer, group_sizes)
        # Without the group sizes, which come back as they are. The next step's scales are not computed.
        return tuple(array for array in jax.tree.leaves(quantized) if array is not group_sizes)

    return _work(run, case)


#: What loads each peer. A loader raises if the peer can't run here; the message says why.
LOADERS: Mapping[str, Callable[[], Peer]] = {
    OURS: load_jax_grouped,
    "jax.numpy": load_plain,
    "transformer_engine.jax": load_transformer_engine,
}
