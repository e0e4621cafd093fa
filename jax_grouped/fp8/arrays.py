"""Quantized arrays: FP8 data with its scales, as pytrees that pass through every transformation of JAX."""

import dataclasses
import json
from typing import Any, TypeVar, get_args

import jax
import numpy as np
from jax import export

from jax_grouped.fp8.layout import QuantizedLayout
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
