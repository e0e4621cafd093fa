"""Blocks of published models, loaded into the layers: results, losses and every gradient beside `transformers`."""

import functools
import importlib
import itertools
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
from tests.meshes import make_mesh

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
#: Classes of `transformers`.
BLOCKS = {
    "mixtral": "MixtralSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "olmoe": "OlmoeSparseMoeBlock",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_layers_compute_what_the_published_block_computes(architecture: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra huggingface: transformers")
    values = {name: value for name, value in CONFIGS[architecture].items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(architecture, **values)
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    block = getattr(module, BLOCKS[architecture])(config).float()
    rng = np.random.default_rng(len(architecture))
    with torch.no_grad():
        for array in (*block.parameters(), *block.buffers()):
            array.copy_(torch.tensor(rng.standard_normal(array.shape, np.float32) * 0.3))
    # Large enough that the activation of gpt-oss clamps some numbers.
    tokens = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32) * (4 if architecture == "gpt_oss" else 1)
    dy = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32)
    x = torch.tensor(tokens, requires_grad=True)
    result = block(x)
    expected_y = result[0] if isinstance(result, tuple) else result
    expected_loss = torch.sum(expected_y * torch.tensor(dy))
    has_balance_loss = hasattr(module, "load_balancing_loss_func")
    if has_balance_loss:
        router = block.router if architecture == "gpt_oss" else block.gate
        expected_balance = module.load_balancing_loss_func((router(x.reshape(-1, FEATURES))[0],), EXPERTS, TOP_K)
        expected_loss = expected_loss + expected_balance
    expected_loss.backward()

    variables = jg.moe.from_huggingface({name: tensor.numpy() for name, tensor in block.state_dict().items()}, config)
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))

    def loss(params: Any, x: jax.Array) -> Any:
        y, metrics = layer.apply({**variables, "params": params}, x)
        # That of transformers counts each token's choices, ours their share.
        balance_loss = TOP_K * metrics.balance_loss
        return jnp.sum(y * dy) + (balance_loss if has_balance_loss else 0), (y, balance_loss)

    with jax.default_matmul_precision("highest"):  # A GPU would round float32.
        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, (y, balance_loss)), (dparams, dx) = step(variables["params"], jnp.asarray(tokens))

    near = dict(rtol=1e-4, atol=1e-3 if architecture == "gpt_oss" else 1e-4)
    np.testing.assert_allclose(y, expected_y.detach().numpy(), **near)
    np.testing.assert_allclose(dx, x.grad.numpy(), **near)
    if has_balance_loss:
        np.testing.assert_allclose(balance_loss, expected_balance.item(), rtol=1e-5)
    gradients = jg.moe.to_huggingface({"params": dparams}, config)
    expected = {name: tensor.grad.numpy() for name, tensor in block.named_parameters()}
    assert {*gradients} == {*expected}
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, **near, err_msg=name)


def make_state(config: Any, *, per_expert: bool = False, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns random weights under their published names."""
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((4, config["hidden_size"])))
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), variables)
    return jg.moe.to_huggingface(random, config, per_expert=per_expert, prefix=prefix)


def test_weights_come_back_as_they_were() -> None:
    for config, per_expert in itertools.product(CONFIGS.values(), (False, True)):
        options = dict(per_expert=per_expert, prefix="model.layers.3.mlp.")
        state = make_state(config, **options)

        others = {"model.layers.30.mlp.gate.weight": np.ones(1), "lm_head.weight": np.ones(1)}
        variables = jg.moe.from_huggingface(state | others, config, prefix="model.layers.3.mlp.")
        back = jg.moe.to_huggingface(variables, config, **options)

        assert {*back} == {*state}
        for name, array in state.items():
            np.testing.assert_array_equal(back[name], array)

        if not per_expert:
            layer = jg.nnx.MoEMlp(FEATURES, **jg.moe.huggingface_options(config), rngs=nnx.Rngs(0))
            jg.nnx.load_variables(layer, variables)
            loaded = jg.moe.to_huggingface(jg.nnx.linen_variables(layer), config, **options)
            jax.tree.map(np.testing.assert_array_equal, loaded, back)

    assert make_state(CONFIGS["mixtral"], per_expert=True)["experts.7.w2.weight"].shape == (FEATURES, HIDDEN)
    state = make_state(CONFIGS["deepseek_v3"], per_expert=True)
    assert state["experts.0.gate_proj.weight"].shape == (HIDDEN, FEATURES)
    assert state["shared_experts.up_proj.weight"].shape == (2 * HIDDEN, FEATURES)
    assert state["gate.e_score_correction_bias"].shape == (EXPERTS,)


def test_kernels_in_fp8_are_dequantized() -> None:
    config = CONFIGS["deepseek_v3"] | dict(hidden_size=160, moe_intermediate_size=144)
    state = make_state(config, per_expert=True)
    numbers = np.random.default_rng(0).integers(-8, 8, (144, 160)).astype(np.float32)
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
    state = make_state(config)
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


def test_tensors_of_pytorch_are_arrays() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    state = make_state(CONFIGS["olmoe"])
    numbers = state["gate.weight"]
    for dtype in ("bfloat16", "float8_e4m3fn", "float32"):
        tensors = {"gate.weight": torch.tensor(numbers, requires_grad=True).to(getattr(torch, dtype))}
        in_fp8 = dtype.startswith("float8")
        if in_fp8:
            tensors["gate.weight_scale_inv"] = torch.ones(1, 1)

        variables = jg.moe.from_huggingface(state | tensors, CONFIGS["olmoe"])

        got = variables["params"]["router"]["kernel"]
        assert got.dtype == ("float32" if in_fp8 else dtype)
        np.testing.assert_array_equal(got.astype(np.float32), numbers.astype(dtype).astype(np.float32).T)


def test_options_follow_the_configuration() -> None:
    assert jg.moe.huggingface_options(CONFIGS["gpt_oss"])["activation"] == GPT_OSS
    options = jg.moe.huggingface_options(CONFIGS["gpt_oss"] | dict(swiglu_limit=5.0))
    assert options["activation"] == jg.SwiGLU(5.0, alpha=1.702, offset=1.0)

    # Deepseek without groups and shared experts.
    config = CONFIGS["deepseek_v3"] | dict(n_group=None, topk_group=None, n_shared_experts=None)
    state = {name: array for name, array in make_state(CONFIGS["deepseek_v3"]).items() if "shared" not in name}
    bias = state["gate.e_score_correction_bias"].astype(jnp.bfloat16)

    options = jg.moe.huggingface_options(config)
    variables = jg.moe.from_huggingface(state | {"gate.e_score_correction_bias": bias}, config)

    assert options["shared_features"] is options["router"].groups is None
    assert variables["router_state"]["selection_bias"].dtype == np.float32
    assert {*jg.moe.to_huggingface(variables, config)} == {*state}


def test_what_does_not_fit_is_named() -> None:
    config, mixtral = CONFIGS["olmoe"], CONFIGS["mixtral"]
    state, whole, mixtral_state = (
        make_state(config, per_expert=True),
        make_state(config),
        make_state(mixtral, per_expert=True),
    )
    variables = jg.moe.from_huggingface(whole, config)
    params = variables["params"]
    layer = jg.nnx.MoEMlp(FEATURES, **jg.moe.huggingface_options(config), rngs=nnx.Rngs(0))
    missing = {name: array for name, array in state.items() if name != "gate.weight"}
    mixtral_state.pop("experts.7.w2.weight")
    other_shape, wrong_kernel = {"gate.weight": np.ones((4, FEATURES))}, {"down": {"kernel": np.ones(3)}}
    path: Any = "model.safetensors"

    def options(**change: Any) -> tuple[Callable[..., Any], ...]:
        return jg.moe.huggingface_options, config | change

    read, write, load = jg.moe.from_huggingface, jg.moe.to_huggingface, jg.nnx.load_variables
    prefixed = {f"model.layers.0.mlp.{name}": array for name, array in state.items()}
    many = state | {f"layers.{i}": np.ones(8) for i in range(10)}
    refused: dict[str, tuple[Any, ...]] = {
        "The state has no gate.weight, which a block of olmoe needs.": (read, missing, config),
        "The state has no experts.7.w2.weight": (read, mixtral_state, mixtral),
        "gate.weight must have shape (8, 32), got (4, 32).": (read, state | other_shape, config),
        "A block of olmoe has no place for ['gate.bias'].": (read, state | {"gate.bias": np.ones(8)}, config),
        "'layers.7'] and 2 more.": (read, many, config),
        "config must be a mapping, or a configuration of transformers, got str.": (read, state, "config.json"),
        "state must be a mapping of names to arrays, got str.": (read, path, config),
        "no names that begin with 'layers.0.'; it has ['model.layers.0.mlp.experts": (
            functools.partial(read, prefix="layers.0."),
            prefixed,
            config,
        ),
        "got 'llama4'.": options(model_type="llama4"),
        "hidden_act must be \"silu\", got 'gelu'.": options(hidden_act="gelu"),
        "The configuration has no num_experts_per_tok.": options(num_experts_per_tok=None),
        "no num_local_experts or num_experts or n_routed_experts.": options(num_experts=None),
        "scoring_func must be \"sigmoid\", got 'softmax'.": options(**CONFIGS["deepseek_v3"], scoring_func="softmax"),
        "The layer has no variable up/kernel.": (load, layer, {"params": {"up": params["gate_up"]}}),
        "down/kernel must have shape (8, 24, 32), got (3,).": (load, layer, {"params": wrong_kernel}),
        "The variables have no params and no router_state, but router, gate_up, down": (load, layer, params),
        "The variables have no params, but router, gate_up, down.": (write, params, config),
        "The variables have no params/gate_up/kernel.": (write, {"params": {"router": params["router"]}}, config),
        "kernel must have shape (8, 24, 32), got (3,).": (write, {"params": params | wrong_kernel}, config),
    }
    for message, (function, *arguments) in refused.items():
        with pytest.raises((KeyError, TypeError, ValueError)) as caught:
            function(*arguments)
        assert message in str(caught.value.args[0]), message


def test_variables_of_linen_are_loaded_where_those_of_nnx_lie() -> None:
    mesh = make_mesh({"expert": 2})
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
