"""Blocks of published models, loaded into the layers: results, losses and every gradient beside `transformers`."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_grouped as jg
from tests.activations import GPT_OSS
from tests.meshes import mesh_of

FEATURES, HIDDEN, EXPERTS, TOP_K, BATCH, LENGTH = 32, 24, 8, 3, 2, 10
SIZES = dict(hidden_size=FEATURES, num_experts_per_tok=TOP_K)
COUNTED = dict(num_local_experts=EXPERTS, intermediate_size=HIDDEN)
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | COUNTED,
    "qwen3_moe": SIZES | dict(num_experts=EXPERTS, moe_intermediate_size=HIDDEN, norm_topk_prob=True),
    "olmoe": SIZES | dict(num_experts=EXPERTS, intermediate_size=HIDDEN, norm_topk_prob=False),
    "deepseek_v3": SIZES
    | dict(
        n_routed_experts=EXPERTS,
        moe_intermediate_size=HIDDEN,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    ),
    "gpt_oss": SIZES | COUNTED,
}
CONFIGS = {name: config | dict(model_type=name) for name, config in CONFIGS.items()}
#: Names of the classes of `transformers`.
BLOCKS = {
    "mixtral": "MixtralSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "olmoe": "OlmoeSparseMoeBlock",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
}
each_architecture = pytest.mark.parametrize("architecture", CONFIGS)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Weights, results and gradients of a block of `transformers`."""

    config: Any
    state: dict[str, np.ndarray]
    x: np.ndarray
    dy: np.ndarray
    y: np.ndarray
    balance_loss: float | None
    gradients: dict[str, np.ndarray]
    dx: np.ndarray


def reference(architecture: str) -> Reference:
    """Runs both passes of a block with random weights, in float32, with the balance loss added if there is one."""
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    pytest.importorskip("transformers", reason="needs the extra huggingface: transformers")
    from transformers import AutoConfig

    values = CONFIGS[architecture]
    config = AutoConfig.for_model(architecture, **{name: of for name, of in values.items() if name != "model_type"})
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    block = getattr(module, BLOCKS[architecture])(config).float()
    rng = np.random.default_rng(len(architecture))
    with torch.no_grad():
        for array in (*block.parameters(), *block.buffers()):
            array.copy_(torch.tensor(rng.standard_normal(array.shape, np.float32) * 0.3))
    # Large enough that the activation of gpt-oss clamps some numbers.
    tokens = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32) * (4 if architecture == "gpt_oss" else 1)
    x = torch.tensor(tokens, requires_grad=True)
    dy = torch.tensor(rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32))
    result = block(x)
    y = result[0] if isinstance(result, tuple) else result
    loss, balance_loss = torch.sum(y * dy), None
    if hasattr(module, "load_balancing_loss_func"):
        router = block.router if architecture == "gpt_oss" else block.gate
        logits = router(x.reshape(-1, FEATURES))[0]
        balance = module.load_balancing_loss_func((logits,), EXPERTS, TOP_K)
        loss, balance_loss = loss + balance, balance.item()
    loss.backward()

    def numbers(of: Any) -> np.ndarray:
        return of.detach().numpy().copy()

    return Reference(
        config,
        {name: numbers(of) for name, of in block.state_dict().items()},
        numbers(x),
        numbers(dy),
        numbers(y),
        balance_loss,
        {name: numbers(of.grad) for name, of in block.named_parameters()},
        numbers(x.grad),
    )


def results_of_linen(config: Any, variables: Any, loss: Callable[..., Any], x: jax.Array) -> Any:
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))

    def of(params: Any, x: jax.Array) -> Any:
        return loss(*layer.apply({**variables, "params": params}, x))

    (_, results), (dparams, dx) = jax.value_and_grad(of, (0, 1), has_aux=True)(variables["params"], x)
    return results, {"params": dparams}, dx


def results_of_nnx(config: Any, variables: Any, loss: Callable[..., Any], x: jax.Array) -> Any:
    layer = jg.nnx.MoEMlp(config.hidden_size, **jg.moe.huggingface_options(config), rngs=nnx.Rngs(0))
    jg.nnx.load_variables(layer, variables)
    for name, array in jg.moe.to_huggingface(jg.nnx.linen_variables(layer), config).items():
        np.testing.assert_array_equal(array, jg.moe.to_huggingface(variables, config)[name])

    def of(layer: nnx.Module, x: jax.Array) -> Any:
        return loss(*layer(x))

    gradient = nnx.value_and_grad(of, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
    (_, results), (dparams, dx) = gradient(layer, x)
    return results, {"params": nnx.to_pure_dict(dparams)}, dx


@pytest.mark.parametrize("results_of", [results_of_linen, results_of_nnx], ids=["linen", "nnx"])
@each_architecture
def test_layers_compute_what_the_published_block_computes(architecture: str, results_of: Callable[..., Any]) -> None:
    expected = reference(architecture)
    variables = jg.moe.from_huggingface(expected.state, expected.config)

    def loss(y: jax.Array, metrics: jg.moe.MoEMetrics) -> Any:
        # That of transformers counts each token's choices, ours their share.
        balance_loss = TOP_K * metrics.balance_loss
        total = jnp.sum(y * expected.dy) + (0 if expected.balance_loss is None else balance_loss)
        return total, (y, balance_loss)

    with jax.default_matmul_precision("highest"):  # A GPU would round float32.
        (y, balance_loss), gradients, dx = results_of(expected.config, variables, loss, jnp.asarray(expected.x))

    near = dict(rtol=1e-4, atol=1e-3 if architecture == "gpt_oss" else 1e-4)
    np.testing.assert_allclose(y, expected.y, **near)
    np.testing.assert_allclose(dx, expected.dx, **near)
    if expected.balance_loss is not None:
        np.testing.assert_allclose(balance_loss, expected.balance_loss, rtol=1e-5)
    got = jg.moe.to_huggingface(gradients, expected.config)
    assert {*got} == {*expected.gradients}
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(got[name], gradient, **near, err_msg=name)


def state_of(architecture: str, *, per_expert: bool = False, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns random weights under their published names."""
    config = CONFIGS[architecture]
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((4, FEATURES)))
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda of: rng.standard_normal(of.shape, np.float32), variables)
    return jg.moe.to_huggingface(random, config, per_expert=per_expert, prefix=prefix)


@pytest.mark.parametrize("per_expert", [False, True], ids=["stacked", "per expert"])
@each_architecture
def test_weights_come_back_as_they_were(architecture: str, per_expert: bool) -> None:
    state = state_of(architecture, per_expert=per_expert, prefix="model.layers.3.mlp.")
    config = CONFIGS[architecture]

    others = {"model.layers.30.mlp.gate.weight": np.ones(1), "lm_head.weight": np.ones(1)}
    variables = jg.moe.from_huggingface(state | others, config, prefix="model.layers.3.mlp.")
    back = jg.moe.to_huggingface(variables, config, per_expert=per_expert, prefix="model.layers.3.mlp.")

    assert {*back} == {*state}
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


def test_names_of_experts_are_those_of_checkpoints() -> None:
    assert state_of("mixtral", per_expert=True)["experts.7.w2.weight"].shape == (FEATURES, HIDDEN)
    state = state_of("deepseek_v3", per_expert=True)
    assert state["experts.0.gate_proj.weight"].shape == (HIDDEN, FEATURES)
    assert state["shared_experts.up_proj.weight"].shape == (2 * HIDDEN, FEATURES)
    assert state["gate.e_score_correction_bias"].shape == (EXPERTS,)


def test_kernels_in_fp8_are_dequantized() -> None:
    config = CONFIGS["deepseek_v3"] | dict(hidden_size=160, moe_intermediate_size=144)
    shape = (144, 160)
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))
    zeros = jax.tree.map(
        lambda of: np.zeros(of.shape), jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((4, 160)))
    )
    state = jg.moe.to_huggingface(zeros, config, per_expert=True)
    numbers = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)
    name = "experts.5.gate_proj.weight"
    state |= {name: numbers.astype(jnp.float8_e4m3fn), f"{name}_scale_inv": np.array([[1, 2], [3, 4]], np.float32)}

    kernel = jg.moe.from_huggingface(state, config)["params"]["gate_up"]["kernel"][5, :, 0]

    np.testing.assert_array_equal(kernel[:128, :128], numbers[:128, :128].T)
    np.testing.assert_array_equal(kernel[128:, :128], 2 * numbers[:128, 128:].T)
    np.testing.assert_array_equal(kernel[128:, 128:], 4 * numbers[128:, 128:].T)
    with pytest.raises(ValueError, match=r"weight_scale_inv must have shape \(2, 2\), got \(2, 3\)"):
        jg.moe.from_huggingface(state | {f"{name}_scale_inv": np.ones((2, 3))}, config)
    del state[f"{name}_scale_inv"]
    with pytest.raises(ValueError, match=rf"{name} is float8_e4m3fn, and the state has no {name}_scale_inv\."):
        jg.moe.from_huggingface(state, config)


def test_kernels_in_mxfp4_are_dequantized() -> None:
    config, rng = CONFIGS["gpt_oss"] | dict(intermediate_size=32), np.random.default_rng(0)
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))
    zeros = jax.tree.map(
        lambda of: np.zeros(of.shape), jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((4, FEATURES)))
    )
    state = jg.moe.to_huggingface(zeros, config)
    blocks = rng.integers(0, 256, (EXPERTS, FEATURES, 1, 16), np.uint8)
    scales = rng.integers(120, 134, (EXPERTS, FEATURES, 1), np.uint8)
    del state["experts.down_proj"]
    state |= {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}

    kernel = jg.moe.from_huggingface(state, config)["params"]["down"]["kernel"]

    # The low half of a byte comes first. 1.5 is 0b0011, -6 is 0b1111.
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    value = numbers[blocks[3, 5, 0, 2] % 8] * (-1 if blocks[3, 5, 0, 2] & 8 else 1)
    assert kernel[3, 4, 5] == value * 2.0 ** (int(scales[3, 5, 0]) - 127)
    transformers = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="needs the extra huggingface: transformers"
    )
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    expected = transformers.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.testing.assert_array_equal(kernel, expected.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_tensors_of_pytorch_are_arrays(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    numbers = state_of("olmoe")["gate.weight"]
    arrays = {"gate.weight": torch.tensor(numbers, requires_grad=True).to(getattr(torch, dtype))}
    in_fp8 = dtype.startswith("float8")
    if in_fp8:
        arrays["gate.weight_scale_inv"] = torch.ones(1, 1)

    variables = jg.moe.from_huggingface(state_of("olmoe") | arrays, CONFIGS["olmoe"])

    got = variables["params"]["router"]["kernel"]
    assert got.dtype == ("float32" if in_fp8 else dtype)
    np.testing.assert_array_equal(got.astype(np.float32), numbers.astype(dtype).astype(np.float32).T)


def test_deepseek_without_groups_and_shared_experts() -> None:
    config = CONFIGS["deepseek_v3"] | dict(n_group=None, topk_group=None, n_shared_experts=None)
    state = {name: array for name, array in state_of("deepseek_v3").items() if "shared" not in name}
    bias = state["gate.e_score_correction_bias"].astype(jnp.bfloat16)

    options = jg.moe.huggingface_options(config)
    variables = jg.moe.from_huggingface(state | {"gate.e_score_correction_bias": bias}, config)

    assert options["shared_features"] is options["router"].groups is None
    assert variables["router_state"]["selection_bias"].dtype == np.float32
    assert {*jg.moe.to_huggingface(variables, config)} == {*state}


def test_gpt_oss_with_other_numbers() -> None:
    assert jg.moe.huggingface_options(CONFIGS["gpt_oss"])["activation"] == GPT_OSS
    options = jg.moe.huggingface_options(CONFIGS["gpt_oss"] | dict(swiglu_limit=5.0))
    assert options["activation"] == jg.SwiGLU(5.0, alpha=1.702, offset=1.0)


@pytest.mark.parametrize(
    ("architecture", "change", "error", "message"),
    [
        ("olmoe", {"gate.weight": None}, KeyError, "The state has no gate.weight, which a block of olmoe needs."),
        (
            "olmoe",
            {"gate.weight": np.ones((4, FEATURES))},
            ValueError,
            r"gate.weight must have shape \(8, 32\), got \(4, 32\).",
        ),
        ("olmoe", {"gate.bias": np.ones(8)}, ValueError, r"A block of olmoe has no place for \['gate.bias'\]."),
        ("mixtral", {"experts.7.w2.weight": None}, KeyError, "The state has no experts.7.w2.weight"),
        ("olmoe", {f"layers.{i}": np.ones(8) for i in range(10)}, ValueError, r"'layers.7'\] and 2 more\."),
    ],
    ids=["missing", "other shape", "unknown", "expert", "many"],
)
def test_weights_that_do_not_fit_are_named(
    architecture: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    state = state_of(architecture, per_expert=True) | change
    state = {name: array for name, array in state.items() if array is not None}

    with pytest.raises(error, match=message):
        jg.moe.from_huggingface(state, CONFIGS[architecture])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(model_type="llama4"), ValueError, r"model_type must be one of \['mixtral', .*\], got 'llama4'."),
        (dict(hidden_act="gelu"), ValueError, "hidden_act must be \"silu\", got 'gelu'."),
        (dict(num_experts_per_tok=None), KeyError, "The configuration has no num_experts_per_tok."),
        (dict(num_experts=None), KeyError, "no num_local_experts or num_experts or n_routed_experts."),
        (
            CONFIGS["deepseek_v3"] | dict(scoring_func="softmax"),
            ValueError,
            "scoring_func must be \"sigmoid\", got 'softmax'.",
        ),
    ],
    ids=["model", "activation", "choices", "experts", "scores"],
)
def test_configurations_that_do_not_fit_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jg.moe.huggingface_options(CONFIGS["olmoe"] | change)


def test_arguments_that_are_no_mappings_and_other_prefixes_are_told() -> None:
    config, state = CONFIGS["olmoe"], state_of("olmoe", prefix="model.layers.0.mlp.")
    path: Any = "model.safetensors"

    with pytest.raises(TypeError, match=r"config must be a mapping, or a configuration of transformers, got str\."):
        jg.moe.from_huggingface(state, "config.json")
    with pytest.raises(TypeError, match=r"state must be a mapping of names to arrays, got str\."):
        jg.moe.from_huggingface(path, config)
    with pytest.raises(KeyError, match=r"no names that begin with 'layers.0.'; it has \['model.layers.0.mlp.experts"):
        jg.moe.from_huggingface(state, config, prefix="layers.0.")


def test_variables_that_do_not_fit_are_named() -> None:
    config = CONFIGS["olmoe"]
    variables = jg.moe.from_huggingface(state_of("olmoe"), config)
    layer = jg.nnx.MoEMlp(FEATURES, **jg.moe.huggingface_options(config), rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"The layer has no variable up/kernel."):
        jg.nnx.load_variables(layer, {"params": {"up": variables["params"]["gate_up"]}})
    with pytest.raises(ValueError, match=r"down/kernel must have shape \(8, 24, 32\), got \(3,\)."):
        jg.nnx.load_variables(layer, {"params": {"down": {"kernel": np.ones(3)}}})
    with pytest.raises(KeyError, match=r"The variables have no params and no router_state, but router, gate_up, down"):
        jg.nnx.load_variables(layer, variables["params"])
    with pytest.raises(KeyError, match=r"The variables have no params, but router, gate_up, down\."):
        jg.moe.to_huggingface(variables["params"], config)
    with pytest.raises(KeyError, match=r"The variables have no gate_up/kernel\."):
        jg.moe.to_huggingface({"params": {"router": variables["params"]["router"]}}, config)
    with pytest.raises(ValueError, match=r"down/kernel must have shape \(8, 24, 32\), got \(3,\)."):
        jg.moe.to_huggingface({"params": variables["params"] | {"down": {"kernel": np.ones(3)}}}, config)


def test_variables_of_linen_are_loaded_where_those_of_nnx_lie() -> None:
    mesh = mesh_of({"expert": 2})
    options = jg.moe.huggingface_options(CONFIGS["olmoe"])
    layer = jg.nnx.MoEMlp(FEATURES, **options, rngs=nnx.Rngs(0))
    placed = jax.device_put(layer.down.kernel[...], NamedSharding(mesh, PartitionSpec("expert")))
    layer.down.kernel.set_value(placed)
    linen = jg.linen.MoEMlp(**options, logical_axes=("expert", None, None))
    variables = linen.init(jax.random.key(1), jnp.ones((4, FEATURES)))  # in Flax's boxes

    jg.nnx.load_variables(layer, variables)

    assert layer.down.kernel[...].sharding == placed.sharding
    expected = variables["params"]["down"]["kernel"].unbox()
    np.testing.assert_array_equal(layer.down.kernel[...], expected)
    layers = nnx.List([layer, layer])
    jg.nnx.load_variables(layers, jg.nnx.linen_variables(layers))


def test_caches_follow_the_kernels_that_are_loaded() -> None:
    config = CONFIGS["olmoe"] | dict(intermediate_size=32)
    options = jg.moe.huggingface_options(config) | dict(recipe=jg.Float8BlockScaling())
    cached, plain = (
        jg.nnx.MoEMlp(FEATURES, **options, cache_kernel=caches, rngs=nnx.Rngs(caches)) for caches in (True, False)
    )
    x = jax.random.normal(jax.random.key(0), (16, FEATURES))

    jg.nnx.load_variables(cached, jg.nnx.linen_variables(plain))

    np.testing.assert_array_equal(cached(x, is_first_microbatch=False)[0], plain(x)[0])
