"""A program of two GPUs, one of which is late, with kernels that no earlier program has launched.

The GPU that is on time is in a collective when its thread launches the second kernel for the first time. CUDA loads the
kernel then, and may wait for the collective: the other GPU's thread must not wait for that to launch the first kernel.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_grouped as jg

LATE_SECONDS = 3


def wait(is_late: jax.Array) -> np.ndarray:
    if is_late[0]:
        time.sleep(LATE_SECONDS)
    return np.zeros((), np.float32)


def step(x: jax.Array, is_late: jax.Array) -> tuple[jax.Array, jax.Array]:
    sizes = jnp.array([96, 0, 160])
    x = x + jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), is_late)
    first = jg.grouped_quantize(x, sizes, jg.ScalingMode.TENSOR, columnwise=True)
    total = jax.lax.psum(jnp.sum(first.amax), "device")
    second = jg.grouped_quantize(x + 0 * total, sizes, jg.ScalingMode.BLOCK_1D, columnwise=True)
    return total, second.amax


def main() -> None:
    mesh = jax.make_mesh((2,), ("device",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("device"), out_specs=(P(), P("device")), check_vma=False)
    )
    x = np.random.default_rng(0).standard_normal((2 * 256, 512), np.float32)
    total, amax = program(jnp.asarray(x), jnp.array([True, False]))
    expected = [np.abs(group).max(initial=0) for group in np.split(x, [96, 96, 256, 352, 352])]
    np.testing.assert_array_equal(amax, expected)
    np.testing.assert_allclose(total, np.sum(expected), rtol=1e-6)


if __name__ == "__main__":
    main()
