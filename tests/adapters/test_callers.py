"""Other projects with what the guide puts in the place of their experts and products."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.project.test_docs import ROOT, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Both use what JAX will remove.

GUIDE = ROOT / "docs" / "migration.md"


def test_grouped_matmul_of_easydel() -> None:
    ejkernel = pytest.importorskip("ejkernel.modules", reason="needs ejkernel")
    rng = np.random.default_rng(0)
    lhs, rhs, added = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((24, 16), (3, 16, 8), (24, 8)))
    sizes = jnp.array([9, 0, 15], jnp.int32)

    for operands, options in (
        ((lhs, rhs, sizes), dict(platform="xla", do_padding=False)),
        ((lhs, rhs, sizes), dict(preferred_element_type=jnp.bfloat16, precision=jax.lax.Precision.HIGHEST)),
        ((lhs, rhs.swapaxes(1, 2), sizes), dict(transpose_rhs=True)),
        ((lhs, rhs, sizes, None, added), dict(do_padding=False)),
    ):
        expected = ejkernel.grouped_matmul(*operands, **{"platform": "xla", **options})
        got = run(GUIDE)["grouped_matmul"](*operands, **options)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-5)


def test_qwen3_of_tunix_has_the_same_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("tunix")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs google-tunix")
    pytest.importorskip("jaxtyping", reason="needs google-tunix: jaxtyping")
    # Without what the packages import beside this model.
    for name in ("tunix", "tunix.models", "tunix.models.qwen3", "tunix.generate"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(Path(*spec.submodule_search_locations, *name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    qwen3 = importlib.import_module("tunix.models.qwen3.model")
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=40,
        embed_dim=32,
        hidden_dim=24,
        num_heads=2,
        head_dim=16,
        num_kv_heads=1,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=4,
        num_experts_per_tok=2,
        shd_config=qwen3.ShardingConfig(*[()] * len(qwen3.ShardingConfig.__dataclass_fields__)),
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)))
    positions, mask = jnp.tile(jnp.arange(6), (2, 1)), jnp.tril(jnp.ones((2, 6, 6), bool))

    @nnx.jit
    def logits_and_gradients(model: Any) -> Any:
        def loss(model: Any) -> Any:
            logits, _ = model(tokens, positions, None, mask)
            return jnp.sum(jnp.sin(logits)), logits

        gradients, logits = nnx.grad(loss, has_aux=True)(model)
        return logits, nnx.to_pure_dict(gradients)

    expected, theirs = logits_and_gradients(model)
    for block in model.layers:
        block.mlp = run(GUIDE)["MoE"](block.mlp)
    got, ours = logits_and_gradients(model)

    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    for block in range(2):
        mlp, experts = theirs["layers"][block]["mlp"], ours["layers"][block]["mlp"]["experts"]
        for a, b in (
            (experts["router"]["kernel"], mlp["router"]["kernel"]),
            (experts["gate_up"]["kernel"][:, :, 0], mlp["gate_proj"]),
            (experts["gate_up"]["kernel"][:, :, 1], mlp["up_proj"]),
            (experts["down"]["kernel"], mlp["down_proj"]),
        ):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max())
