"""The objects of options: what their fields become, and which values are refused."""

import math
import re
from typing import Any

import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.moe import Parallel, Router


def test_numbers_and_flags_of_numpy_become_those_of_python() -> None:
    flags = ("normalize", "use_bias", "use_selection_bias", "balance_sequences")
    sizes, numbers = ("top_k", "groups", "top_groups"), ("scale", "capacity_factor")
    given = dict.fromkeys(sizes, np.int64(2)) | dict.fromkeys(numbers, np.float32(1.5)) | dict.fromkeys(flags, np.True_)

    router, activation = Router(**given), jg.SwiGLU(np.float32(7), alpha=np.float64(1.5), offset=np.int32(1))

    expected = dict.fromkeys(sizes, 2) | dict.fromkeys(numbers, 1.5) | dict.fromkeys(flags, True)
    assert router == Router(**expected)
    assert activation == jg.SwiGLU(7.0, alpha=1.5, offset=1.0)
    assert not any(isinstance(value, np.generic) for made in (router, activation) for value in vars(made).values())
    for made, fields, value, kind in (
        (Router, sizes, True, "an integer"),
        (Router, sizes, 1.5, "an integer"),
        (Router, numbers, np.True_, "a number"),
        (Router, flags, 1, "True or False"),
        (jg.SwiGLU, ("limit", "alpha", "offset"), "7", "a number"),
    ):
        for field in fields:
            wrong = (expected if made is Router else {}) | {field: value}
            with pytest.raises(TypeError, match=f"^{field} must be {kind}"):
                made(**wrong)


def test_axes_are_names() -> None:
    parallel = Parallel(experts="e", fsdp="f", features="m", batch="b")

    assert parallel == Parallel(experts="e", fsdp="f", features="m", batch=["b"])
    assert (parallel.token_axes, parallel.storage_axes) == (("b", "f", "e"), ("e", "f"))
    assert parallel.axes == ("b", "f", "e", "m")
    assert Parallel(experts="e", batch=("e", "b")).axes == ("e", "b")
    assert hash(parallel) == hash(Parallel(experts="e", fsdp="f", features="m", batch=("b",)))


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (Router, dict(top_k=0), "top_k must be at least 1, got 0."),
        (Router, dict(score="tanh"), "score must be one of ('softmax', 'sigmoid'), got 'tanh'."),
        (Router, dict(drop_by="last"), "drop_by must be one of ('even', 'weight'), got 'last'."),
        (Router, dict(groups=1), "groups and top_groups need each other, got 1 and None."),
        (Router, dict(groups=5, top_groups=6), "top_groups must be at most the 5 groups, got 6."),
        (Router, dict(capacity_factor=0), "capacity_factor must be a positive number, or None for the worst case, got"),
        (Router, dict(capacity_factor=math.nan), "capacity_factor must be a positive number, or None for the worst"),
        (Parallel, dict(exchange="ring"), "exchange must be one of ('auto', 'gather', 'padded'), got 'ring'."),
        (Parallel, dict(dispatch="bf16"), "dispatch must be one of ('fp8', 'input'), got 'bf16'."),
        (Parallel, dict(combine=True), "combine must be one of ('fp8', 'input'), got True."),
        (Parallel, dict(experts=("a", "b")), "experts must be the name of one mesh axis, got ('a', 'b')."),
        (Parallel, dict(batch=3), "batch must be a sequence of names of mesh axes, got 3."),
        (Parallel, dict(batch=("a", "a")), "batch must be different axes, got ('a', 'a')."),
        (Parallel, dict(features="a", batch="a"), "The features axis 'a' must be none of experts, fsdp and batch,"),
        (Parallel, dict(fsdp="a", experts="a"), "fsdp must be another axis than experts, got 'a' for both:"),
        (jg.SwiGLU, dict(limit=0), "limit must be a positive number, or None, got 0.0."),
        (jg.SwiGLU, dict(alpha=math.inf), "alpha and offset must be finite, got inf and 0.0."),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_values_that_are_not_supported_are_named(made: Any, options: dict[str, Any], message: str) -> None:
    required = dict(top_k=2) if made is Router else {}

    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        made(**required | options)
