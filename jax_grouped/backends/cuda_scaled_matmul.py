"""Products of quantized operands in the `cuda` backend: a custom call, of batches as in `jax_grouped.backends.cuda`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.backends.cuda import WORKSPACE_BYTES, call
from jax_grouped.backends.spec import ScaledMatmulSpec, batched
from jax_grouped.group_layout import scaled_matmul_scratch_bytes


def scaled_matmul(
    a_data: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    spec: ScaledMatmulSpec,
    batch: int,
) -> jax.Array:
    """One of the three products of `ScaledMatmulSpec`, accumulated in float32."""
    scratch = jax.ShapeDtypeStruct((scaled_matmul_scratch_bytes(batch, spec.num_groups),), jnp.uint8)
    workspace = jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)
    return call(
        "jax_grouped_scaled_matmul",
        [batched(spec.out, batch), scratch, workspace],
        *(a_data, a_scale, b_data, b_scale, group_sizes, group_offset),
        product=spec.product,
        a_mode=spec.a.mode.value,
        b_mode=spec.b.mode.value,
        tokens=np.int64(spec.a.tokens),
        kernel_batch=np.int64(batch if spec.product == "wgrad" else b_data.shape[0] // spec.num_groups),
    )[0]
