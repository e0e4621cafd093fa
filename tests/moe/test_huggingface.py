"""Blocks of published models, loaded into the layers: results, losses and every gradient beside `transformers`."""

import functools
import importlib.util
import inspect
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_grouped as jg
from jax_grouped.moe.architectures import ARCHITECTURES, MISSING
from tests.activations import GPT_OSS
from tests.meshes import make_mesh
from tests.operands import normal

FEATURES, HIDDEN, EXPERTS, TOP_K, BATCH, LENGTH = 32, 24, 8, 3, 2, 10
SIZES = dict(hidden_size=FEATURES, num_experts_per_tok=TOP_K)
COUNTED = dict(num_local_experts=EXPERTS, intermediate_size=HIDDEN)
SHARED = dict(moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS, norm_topk_prob=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | COUNTED,
    "qwen3_moe": SIZES | dict(num_experts=EXPERTS, moe_intermediate_size=HIDDEN, norm_topk_prob=True),
    "olmoe": SIZES | dict(num_experts=EXPERTS, intermediate_size=HIDDEN, norm_topk_prob=False),
    "deepseek_v3": SIZES | SHARED | dict(n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "gpt_oss": SIZES | COUNTED,
    "qwen2_moe": SIZES | SHARED | dict(shared_expert_intermediate_size=40),
    "ernie4_5_moe": SIZES | SHARED | dict(moe_num_shared_experts=1),
    "granitemoe": SIZES | COUNTED,
    "hy_v3": SIZES | SHARED | dict(num_shared_experts=1),
    "llama4_text": SIZES | COUNTED | dict(num_experts_per_tok=1),
    "minimax_m3_vl_text": SIZES | COUNTED | dict(shared_intermediate_size=40),
    "qwen3_vl_moe_text": SIZES | dict(num_experts=EXPERTS, moe_intermediate_size=HIDDEN),
    "nemotron_h": SIZES | SHARED | dict(moe_shared_expert_intermediate_size=40, mlp_hidden_act="relu2"),
}
CONFIGS = {name: config | dict(model_type=name) for name, config in CONFIGS.items()}
#: Values of any of the keys that configurations have, and those that some models need.
VALUES: dict[str, Any] = dict(
    hidden_size=FEATURES,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), TOP_K),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), HIDDEN),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 40),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 40),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor"), 2.5),
    route_scale=1.5,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    moe_router_logit_softcapping=3.0,
)
OTHERS: dict[str, dict[str, Any]] = {
    "axk2": dict(n_group=None, topk_group=None),  # It gives experts of other groups the score 0.
    "deepseek_ocr2_text": dict(topk_method="greedy"),
    "deepseek_v2": dict(topk_method="group_limited_greedy"),
    "deepseek_v4": dict(num_hidden_layers=1, mlp_layer_types=["moe"], n_shared_experts=1),
    "dots1": dict(norm_topk_prob=False),
    "granitemoehybrid": dict(mamba_n_heads=4, mamba_d_head=16),
    "llama4_text": dict(num_experts_per_tok=1),
    "unlimited_ocr_text": dict(num_attention_heads=4, num_key_value_heads=4),
}


def published_block(model: str) -> tuple[Any, Any, Any]:
    """Returns a small configuration of a model of `transformers`, its module, and its mixture of experts."""
    torch = pytest.importorskip("torch", reason="needs the extra huggingface: torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra huggingface: transformers")
    code = {"kimi_k2": "deepseek_v3"}.get(model, model)  # Its own code is not part of `transformers`.
    kind = transformers.CONFIG_MAPPING[code]
    known = {*inspect.signature(kind).parameters, *getattr(kind, "attribute_map", {})}
    for name in ("shared_expert_intermediate_size", "norm_topk_prob"):
        known |= {name} if "talker" in model else set()
    config = kind(**{name: value for name, value in VALUES.items() if name in known} | OTHERS.get(model, {}))
    config.model_type, config._experts_implementation = model, "eager"
    folders = (re.sub(f"{end}$", "", code) for end in ("", "_text", "_talker_text"))
    (folder, *_) = (name for name in folders if importlib.util.find_spec(f"transformers.models.{name}"))
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    blocks = [
        block
        for name, block in vars(module).items()
        if re.fullmatch(r"(?!.*Vision).*(SparseMo[eE]Block|MoE|Moe|MoELayer|GptOssMLP)", name)
        and ("Talker" in name) == ("talker" in model)
        and block.__module__ == module.__name__
        and "self.experts = " in inspect.getsource(block)
    ]
    block = blocks[0](config, *[0] * ("layer_idx" in inspect.signature(blocks[0]).parameters)).float()
    rng = np.random.default_rng(len(model))
    with torch.no_grad():
        for array in (*block.parameters(), *block.buffers()):
            array.copy_(torch.tensor(rng.standard_normal(array.shape, np.float32) * 0.3))
    return config, module, block


@pytest.mark.parametrize("model", sorted(ARCHITECTURES))
def test_layers_compute_what_the_published_block_computes(model: str) -> None:
    config, module, block = published_block(model)
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    # Large enough that activations with a limit clamp some numbers.
    tokens = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32) * (4 if ARCHITECTURES[model].clamps else 1)
    dy = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32)
    x = torch.tensor(tokens, requires_grad=True)
    result = block(x)
    expected_y = (result[0] if isinstance(result, tuple) else result).reshape(x.shape)
    expected_loss = torch.sum(expected_y * torch.tensor(dy))
    has_balance_loss = model in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
    if has_balance_loss:
        router = block.router if model == "gpt_oss" else block.gate
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

    def check(got: Any, expected: Any, name: str) -> None:
        expected = expected.detach().numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(), err_msg=name)

    check(y, expected_y, "y")
    check(dx, x.grad, "dx")
    if has_balance_loss:
        np.testing.assert_allclose(balance_loss, expected_balance.item(), rtol=1e-5)
    gradients = jg.moe.to_huggingface({"params": dparams}, config)
    expected = {name: tensor.grad for name, tensor in block.named_parameters() if tensor.requires_grad}
    assert {*gradients} == {*expected}
    for name, gradient in expected.items():
        check(gradients[name], gradient, name)


def test_configurations_of_text_models_are_found_inside_and_may_lack_what_code_knows() -> None:
    text = CONFIGS["deepseek_v3"] | dict(model_type="kimi_k2", routed_scaling_factor=None, norm_topk_prob=None)
    got = jg.moe.huggingface_options(dict(model_type="kimi_k25", text_config=text))
    router = jg.moe.Router(TOP_K, score="sigmoid", groups=4, top_groups=2, use_selection_bias=True)
    assert got["router"] == router
    assert jg.moe.huggingface_options(CONFIGS["gpt_oss"])["activation"] == GPT_OSS


def test_the_page_names_every_model() -> None:
    page = pathlib.Path(__file__).parents[2].joinpath("docs/reference/models.md").read_text()
    listed, _, table = page.partition("A test compares")[2].partition("A model of several modalities")
    assert re.findall(r"`(\w+)`[,.]", listed.partition("number.")[2]) == sorted(ARCHITECTURES)
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == {"model_type": "needs"} | MISSING
    assert not {*ARCHITECTURES} & {*MISSING}
    assert f"of {len(ARCHITECTURES)} kinds of published models" in page


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

    published = make_state(CONFIGS["qwen3_vl_moe_text"], per_expert=True)
    assert published["experts.gate_up_proj"].shape == (EXPERTS, FEATURES, 2 * HIDDEN)
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


def test_kernels_with_other_scales_in_fp8_are_dequantized() -> None:
    config = CONFIGS["qwen3_moe"] | dict(hidden_size=160, moe_intermediate_size=80)
    state, rng = make_state(config), np.random.default_rng(0)
    name, numbers = "experts.gate_up_proj", rng.integers(-8, 8, (EXPERTS, 160, 160)).astype(np.float32)
    row, column = np.arange(160), np.arange(160)
    # Scales of rows, of the whole, and of blocks of 128x128 that begin anew with up.
    for suffix, scales, spread in (
        ("_scale", rng.random((EXPERTS, 160, 1), np.float32), lambda scales: scales),
        ("_scale", np.array([0.5], np.float32), lambda scales: scales),
        ("_scale_inv", rng.random((EXPERTS, 2, 2), np.float32), lambda s: s[:, row // 128][:, :, column // 128]),
    ):
        stored = {name: numbers.astype(jnp.float8_e4m3fn), f"{name}{suffix}": scales}
        kernel = jg.moe.from_huggingface(state | stored, config)["params"]["gate_up"]["kernel"]
        expected = (numbers * spread(scales)).reshape(EXPERTS, 2, 80, 160).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(kernel, expected)
    wide = config | dict(moe_intermediate_size=144)
    numbers, scales = rng.integers(-8, 8, (EXPERTS, 288, 160)), rng.random((EXPERTS, 4, 2), np.float32)
    stored = {name: numbers.astype(jnp.float8_e4m3fn), f"{name}_scale_inv": scales}
    kernel = jg.moe.from_huggingface(make_state(wide) | stored, wide)["params"]["gate_up"]["kernel"]
    row_scales = scales[:, np.arange(288) // 144 * 2 + np.arange(288) % 144 // 128]
    expected = (numbers * row_scales[:, :, column // 128]).reshape(EXPERTS, 2, 144, 160).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(kernel, expected.astype(np.float32))


@pytest.mark.parametrize("per_expert", [False, True])
def test_experts_in_fp8_are_written_as_they_are_and_read_back(per_expert: bool) -> None:
    config = CONFIGS["qwen2_moe"] | dict(
        hidden_size=192, moe_intermediate_size=128, shared_expert_intermediate_size=256
    )
    recipe = jg.Float8BlockScaling(pow2_scales=True)
    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config), recipe=recipe, cache_kernel=True)
    x = normal(0, (4, 192))
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    in_fp8 = jg.linen.quantize_for_inference(variables, recipe)

    state = jg.moe.to_huggingface(in_fp8, config, per_expert=per_expert)

    cache = in_fp8["kernel_cache"]["gate_up"]["kernel"].columnwise
    if per_expert:
        got = state["experts.3.up_proj.weight"], state["experts.3.up_proj.weight_scale_inv"]
        expected = cache.data[3, 128:], cache.scale_inv[3, 1:2, :2]
        assert state["shared_expert.down_proj.weight_scale_inv"].shape == (2, 2)
    else:
        got = state["experts.gate_up_proj"], state["experts.gate_up_proj_scale_inv"]
        expected = cache.data, cache.scale_inv[..., :2]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))
    # Powers of two are found again, so the numbers are quantized to the same bits.
    read = jax.tree.map(jnp.asarray, jg.moe.from_huggingface(state, config))
    again = jg.linen.quantize_for_inference({**read, "kernel_cache": variables["kernel_cache"]}, recipe)
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        a, b = (tree["kernel_cache"][name]["kernel"].columnwise for tree in (again, in_fp8))
        np.testing.assert_array_equal(*[np.asarray(x.data).view(np.uint8) for x in (a, b)], err_msg=name)
    apply = jax.jit(layer.apply)
    np.testing.assert_array_equal(apply(again, x)[0], apply(in_fp8, x)[0])
    with pytest.raises(
        ValueError, match="F must be a multiple of 128 to write gate and up of params/gate_up/kernel in"
    ):
        other = dict(moe_intermediate_size=64, shared_expert_intermediate_size=None)
        narrow = jg.linen.MoEMlp(**jg.moe.huggingface_options(config | other), recipe=recipe, cache_kernel=True)
        made = jg.linen.quantize_for_inference(jax.jit(narrow.init)(jax.random.key(1), x), recipe)
        jg.moe.to_huggingface(made, config | other)
    gpt_oss = CONFIGS["gpt_oss"] | dict(hidden_size=192, intermediate_size=128)
    params = {"router": {"kernel": np.ones((192, EXPERTS)), "bias": np.ones(EXPERTS)}}
    caches = {"gate_up": {"kernel": in_fp8["kernel_cache"]["gate_up"]["kernel"]}}
    with pytest.raises(ValueError, match="rows of gate and up alternate in a block"):
        jg.moe.to_huggingface({"params": params, "kernel_cache": caches}, gpt_oss)


def test_kernels_in_mxfp4_are_dequantized_and_written_again() -> None:
    config, rng = CONFIGS["gpt_oss"] | dict(intermediate_size=32), np.random.default_rng(0)
    state = make_state(config)
    blocks = rng.integers(0, 256, (EXPERTS, FEATURES, 1, 16), np.uint8)
    scales = rng.integers(120, 134, (EXPERTS, FEATURES, 1), np.uint8)
    del state["experts.down_proj"]
    state |= {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}

    variables = jg.moe.from_huggingface(state, config)
    kernel = variables["params"]["down"]["kernel"]

    written = jg.moe.to_huggingface(variables, config, mxfp4=True)
    back = jg.moe.from_huggingface(written, config)["params"]
    np.testing.assert_array_equal(back["down"]["kernel"], kernel)
    # Other numbers become the nearest ones of a block whose largest is between 4 and 8.
    given, got = (params["gate_up"]["kernel"].reshape(EXPERTS, -1, 2 * 32) for params in (variables["params"], back))
    power = 2.0 ** np.floor(np.log2(np.abs(given).max(axis=1, keepdims=True)) - 2)
    nearest = np.abs(np.abs(given / power)[..., None] - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])).min(axis=-1)
    np.testing.assert_allclose(np.abs(given - got) / power, nearest, atol=1e-6)
    other = CONFIGS["mixtral"]
    with pytest.raises(ValueError, match=r"^experts\.gate_up_proj cannot be in MXFP4, as kernels of gpt-oss"):
        jg.moe.to_huggingface(jg.moe.from_huggingface(make_state(other), other), other, mxfp4=True)

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
        "'unlimited_ocr_text'] or a model of these, got 'bert'.": options(model_type="bert"),
        "The layer does not compute the experts of 'phimoe': sparsemixer": options(model_type="phimoe"),
        "hidden_act must be one of ['silu', 'swish',": options(hidden_act="gelu"),
        "model.layers.0.mlp. is a dense feed-forward network, as some layers of olmoe are.": (
            functools.partial(read, prefix="model.layers.0.mlp."),
            {f"model.layers.0.mlp.{name}.weight": np.ones(1) for name in ("gate_proj", "up_proj", "down_proj")},
            config,
        ),
        "The configuration has no num_experts_per_tok or": options(num_experts_per_tok=None),
        "no num_local_experts or num_experts or n_routed_experts or moe_num_experts.": options(num_experts=None),
        "scoring_func must be one of ('softmax', 'sigmoid', 'sqrtsoftplus'), got 'tanh'.": options(scoring_func="tanh"),
        "moe_latent_size must be None, got 8": options(moe_latent_size=8),
        "The layer has no variable up/kernel.": (load, layer, {"params": {"up": params["gate_up"]}}),
        "down/kernel must have shape (8, 24, 32), got (3,).": (load, layer, {"params": wrong_kernel}),
        "The variables have none of params, router_state, lora, but router, gate_up, down": (load, layer, params),
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
    x = normal(0, (16, FEATURES))

    jg.nnx.load_variables(cached, jg.nnx.linen_variables(plain))

    np.testing.assert_array_equal(cached(x, is_first_microbatch=False)[0], plain(x)[0])
