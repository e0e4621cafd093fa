"""States of delayed scaling that are made by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_grouped as jg

NAMES = ("input", "kernel", "output_grad")


def fp8_state(**fields: Any) -> jg.Fp8State:
    """Returns a state of these histories and scales, with marks that fit."""
    for name in NAMES:
        newest = np.asarray(fields[f"{name}_amax_history"])[:, 0]
        mark = np.where(newest > 0, 0.7 * np.clip(newest, 2.0**-60, 2.0**60) ** 2, 0)
        fields[f"{name}_amax_mark"] = jnp.asarray(mark, jnp.float32)
    return jg.Fp8State(**fields)
