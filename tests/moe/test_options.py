"""The objects of options: what their fields become, and which values are refused."""

import math
from typing import Any

import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.moe import Parallel, Router
from tests.refusals import assert_refused


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


def test_values_that_are_not_supported_are_named() -> None:
    factor = "capacity_factor must be a positive number, or None for the worst case, got"
    refused: dict[Any, dict[str, dict[str, Any]]] = {
        Router: {
            "top_k must be at least 1, got 0.": dict(top_k=0),
            "score must be one of ('softmax', 'sigmoid', 'sqrtsoftplus'), got 'tanh'.": dict(score="tanh"),
            "drop_by must be one of ('even', 'weight'), got 'last'.": dict(drop_by="last"),
            "groups and top_groups need each other, got 1 and None.": dict(groups=1),
            "top_groups must be at most the 5 groups, got 6.": dict(groups=5, top_groups=6),
            f"{factor} 0": dict(capacity_factor=0),
            f"{factor} nan": dict(capacity_factor=math.nan),
        },
        Parallel: {
            "exchange must be one of ('auto', 'gather', 'padded', 'push'), got 'ring'.": dict(exchange="ring"),
            "dispatch must be one of ('fp8', 'input'), got 'bf16'.": dict(dispatch="bf16"),
            "combine must be one of ('fp8', 'input'), got True.": dict(combine=True),
            "features must be the name of one mesh axis, got ('a', 'b').": dict(features=("a", "b")),
            "experts must be the name of a mesh axis or a sequence of names, got 3.": dict(experts=3),
            "batch must be the name of a mesh axis or a sequence of names, got 3.": dict(batch=3),
            "batch must be different axes, got ('a', 'a').": dict(batch=("a", "a")),
            "The features axis 'a' must be none of experts, fsdp and batch,": dict(features="a", batch="a"),
            "fsdp must be another axis than experts, got 'a' for both:": dict(fsdp="a", experts="a"),
        },
        jg.SwiGLU: {
            "limit must be a positive number, or None, got 0.0.": dict(limit=0),
            "alpha and offset must be finite, got inf and 0.0.": dict(alpha=math.inf),
        },
    }
    for made, table in refused.items():
        assert_refused(made, dict(top_k=2) if made is Router else {}, table)
