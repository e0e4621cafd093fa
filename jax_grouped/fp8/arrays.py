"""Quantized arrays: FP8 data with its scales, as pytrees, which transformations of JAX and collectives take."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_grouped.fp8.layout import QuantizedLayout, pad_to
from jax_grouped.fp8.recipes import Recipe, ScalingMode

T = TypeVar("T")


def register_pytree(cls: type[T]) -> type[T]:
    """Registers a dataclass, whose static fields are layouts and recipes, as a pytree, also for `jax.export`."""
    jax.tree_util.register_dataclass(cls)
    export.register_pytree_node_serialization(
        cls, serialized_name=f"jax_grouped.{cls.__name__}", serialize_auxdata=_to_json, deserialize_auxdata=_from_json
    )
    return short_repr(cls)


def short_repr(cls: type[T]) -> type[T]:
    """Gives a dataclass a repr on one line, with types and shapes in place of arrays."""

    def text(self: Any) -> str:
        fields = [field.name for field in dataclasses.fields(self) if field.repr]
        return f"{cls.__name__}({', '.join(f'{name}={_brief(getattr(self, name))}' for name in fields)})"

    # A decorator has no other way to give a class a method.
    cls.__repr__ = text  # type: ignore[method-assign]
    return cls


def _brief(value: Any) -> str:
    """Returns a short text for a field. Takes any value, as JAX also builds pytrees of objects that are no arrays."""
    match value:
        case _ if isinstance(value, Recipe):
            return type(value).__name__
        case QuantizedLayout():
            return f"{value.mode.name} {'columnwise' if value.columnwise else 'rowwise'}"
        case dict():
            return f"{{{', '.join(f'{key}: {_brief(part)}' for key, part in value.items())}}}"
        case tuple() if hasattr(value, "_asdict"):
            fields = ", ".join(f"{name}={_brief(part)}" for name, part in value._asdict().items())
            return f"{type(value).__name__}({fields})"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and not isinstance(value, ScaledArray):
        return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
    return repr(value)


_STATIC = {kind.__name__: kind for kind in (QuantizedLayout, *get_args(Recipe))}


def _to_json(static: tuple[Any, ...]) -> bytes:
    def text(value: Any) -> str:
        return value.value if isinstance(value, ScalingMode) else value.name

    fields = [
        None if field is None else {"class": type(field).__name__} | dataclasses.asdict(field) for field in static
    ]
    return json.dumps(fields, default=text).encode()


def _from_json(text: bytes | bytearray) -> tuple[Any, ...]:
    def static(fields: dict[str, Any] | None) -> Any:
        if fields is None:
            return None
        if "mode" in fields:
            fields["mode"] = ScalingMode(fields["mode"])
        return _STATIC[fields.pop("class")](**fields)

    return tuple(map(static, json.loads(text)))


@register_pytree
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """One orientation of a quantized array: `x ~ data * scale_inv`, block by block.

    Attributes:
        data: float8, laid out as `QuantizedLayout` says.
        scale_inv: float32, or float8_e8m0fnu with `ScalingMode.MX`.
        group_sizes: `int32[G]`, rows per group; None for a stack of equal groups. In the residuals of a call with a
            `group_offset` it has the sizes of all `E` groups, and the offset is not in the array.
        layout: positions of each group's data and scales; static.

    Example:
        x = 0.3 * jnp.ones((16, 32))
        scaled = jg.grouped_quantize(x, jnp.array([10, 4]), jg.ScalingMode.TENSOR, columnwise=True).rowwise

        assert isinstance(scaled, jg.ScaledArray)
        assert scaled.shape == (16, 32) and scaled.dtype == jnp.float8_e4m3fn
        assert jnp.allclose(scaled.data[:14].astype(jnp.float32) * scaled.scale_inv[0], 0.3)
    """

    data: jax.Array
    scale_inv: jax.Array
    group_sizes: jax.Array | None
    layout: QuantizedLayout = dataclasses.field(metadata=dict(static=True))

    @property
    def dtype(self) -> np.dtype:
        """The FP8 type."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array before quantization: `[T, C]`, or `[E, K, C]` for a stack."""
        layout = self.layout
        if layout.stack_rows is None:
            return (layout.tokens, layout.features)
        return (layout.num_groups, layout.stack_rows, layout.features)


@register_pytree
@dataclasses.dataclass(frozen=True)
class GroupedQuantized:
    """Result of `jax_grouped.grouped_quantize`: both orientations of a quantized array, and its statistics.

    Attributes:
        rowwise: quantized along the features, or None.
        columnwise: quantized along the rows of each group and stored transposed, or None.
        amax: `float32[G]`, the largest finite absolute value of each group.
        dbias: `float32[G, C]`, the sum of each group's rows before quantization, or None.

    Example:
        x = 0.3 * jnp.ones((16, 32))
        quantized = jg.grouped_quantize(x, jnp.array([10, 4]), jg.ScalingMode.TENSOR, columnwise=True)

        assert isinstance(quantized, jg.GroupedQuantized)
        assert jnp.allclose(quantized.amax, 0.3) and quantized.dbias is None
    """

    rowwise: ScaledArray | None
    columnwise: ScaledArray | None
    amax: jax.Array
    dbias: jax.Array | None


@register_pytree
@dataclasses.dataclass(frozen=True)
class KernelCache:
    """A quantized stack of kernels `[E, K, N]`, which microbatches share; from `jax_grouped.quantize_kernel`.

    Attributes:
        rowwise: quantized along `N`; dgrad reads it. None in a cache without gradients.
        columnwise: quantized along `K` and stored transposed; fprop reads it.
        amax: `float32[E]`, the largest finite absolute value of each kernel.
        recipe: the one that it was made with, static; None if that is not known.

    Example:
        kernel = jnp.ones((2, 32, 16))
        cache = jg.quantize_kernel(kernel, jg.Float8CurrentScaling())

        assert isinstance(cache, jg.KernelCache)
        assert cache.rowwise.shape == kernel.shape and cache.amax.tolist() == [1.0, 1.0]
    """

    rowwise: ScaledArray | None
    columnwise: ScaledArray
    amax: jax.Array
    recipe: Recipe | None = dataclasses.field(default=None, metadata=dict(static=True))


def gather_stack(own: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Gathers the stacks of all devices of a mesh axis into one."""
    return _move_stack(own, functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True))


def exchange_stacks(parts: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Sends group `i` of a stack to device `i` of the axis, and returns the groups that come from all devices."""
    return _move_stack(parts, lambda x: jax.lax.all_to_all(x, axis_name, 0, 0))


def gather_kernels(own: ScaledArray, storage: Sequence[tuple[str, ...]], layout: QuantizedLayout) -> ScaledArray:
    """Gathers a stack of kernels, each axis of whose data is split over the mesh axes in `storage`, in whole blocks."""

    def move(x: jax.Array) -> jax.Array:
        # Scales of whole matrices, and those of MX, have fewer axes: such kernels are stored in parts by experts, or
        # all parts have the same scales.
        for axis, names in enumerate(storage[: x.ndim]):
            x = jax.lax.all_gather(x, names, axis=axis, tiled=True) if names else x
        return x

    scale_inv = own.scale_inv
    if layout.mode == ScalingMode.BLOCK_2D:  # A row of scales may have more room than it needs.
        scale_inv = scale_inv[:, :, : own.layout.blocks(own.data.shape[2])]
    data, scale_inv = _move_arrays(own.data, scale_inv, move)
    return ScaledArray(data, pad_to(scale_inv, layout.scale_shape), None, layout)


def _move_stack(own: ScaledArray, move: Callable[[jax.Array], jax.Array]) -> ScaledArray:
    return as_stack(*_move_arrays(own.data, own.scale_inv, move), own.layout)


def as_stack(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> ScaledArray:
    """Returns a stack of as many groups as there are, each as those of the layout."""
    assert layout.stack_rows is not None
    layout = dataclasses.replace(layout, num_groups=len(data), tokens=len(data) * layout.stack_rows)
    return ScaledArray(data, scale_inv, None, layout)


def _move_arrays(
    data: jax.Array, scale_inv: jax.Array, move: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Moves both arrays, the scales first: XLA runs one collective at a time, and other work during the longer one."""
    scale_inv = _move_bytes(move, scale_inv)
    data, scale_inv = jax.lax.optimization_barrier((data, scale_inv))
    return _move_bytes(move, data), scale_inv


def _move_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves an array. Not every backend sends FP8 numbers, but all send bytes."""
    if x.dtype.itemsize > 1:
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)
