"""Adapters of low rank on experts: beside merged kernels, over kernels in FP8 alone, and beside PEFT."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_grouped as jg
from jax_grouped.linen import LoraConfig
from jax_grouped.moe import Parallel, Router, Weights
from tests.meshes import typed_mesh
from tests.moe.test_huggingface import published_block
from tests.programs import custom_calls, lowered, products
from tests.refusals import assert_refused

T, E, K, F, RANK = 64, 8, 32, 32, 4
CURRENT, BLOCK = jg.Float8CurrentScaling(), jg.Float8BlockScaling()
ROUTER = Router(2)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * (shape[1] ** -0.5 if len(shape) > 2 else 1))

    return dict(
        x=draw(T, K),
        logits=draw(T, E),
        gate_up=draw(E, K, 2 * F),
        down=draw(E, F, K),
        gate_up_lora=jg.Lora(draw(E, K, RANK), draw(E, RANK, 2 * F)),
        down_lora=jg.Lora(draw(E, F, RANK), draw(E, RANK, K)),
    )


def adapted(given: dict[str, Any], parallel: Parallel | None = None) -> jax.Array:
    gate_up = Weights(given["gate_up"], lora=given["gate_up_lora"])
    down = Weights(given["down"], lora=given["down_lora"])
    return jg.moe.moe_mlp(given["x"], given["logits"], gate_up, down, router=ROUTER, parallel=parallel)[0]


def merged(given: dict[str, Any]) -> jax.Array:
    gate_up, down = (given[f"{name}_lora"].merge(given[name]) for name in ("gate_up", "down"))
    return jg.moe.moe_mlp(given["x"], given["logits"], gate_up, down, router=ROUTER)[0]


def result_and_gradients(function: Any, given: dict[str, Any]) -> Any:
    def loss(given: dict[str, Any]) -> Any:
        y = function(given)
        return jnp.sum(y * jnp.cos(jnp.arange(y.shape[1]))), y

    with jax.default_matmul_precision("highest"):
        (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return y, gradients


def assert_close(got: Any, expected: Any, tolerance: float = 2e-6) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def test_result_and_gradients_are_those_of_merged_kernels(backend: str) -> None:
    assert_close(result_and_gradients(adapted, arrays()), result_and_gradients(merged, arrays()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("auto", dict(experts="a", features="b")),
        ("explicit", dict(experts="a", fsdp="b")),
        ("auto", dict(fsdp="a", features="b")),
    ],
)
def test_they_are_those_of_one_device_on_a_mesh(backend: str, kind: str, axes: dict[str, str]) -> None:
    parallel = Parallel(**axes)
    mesh = typed_mesh(kind, {"a": 2, "b": 2})
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(arrays(), NamedSharding(mesh, PartitionSpec()))
        got = result_and_gradients(functools.partial(adapted, parallel=parallel), on_mesh)
    assert_close(got, result_and_gradients(merged, arrays()))


def test_explicit_axes_may_split_the_features_of_tokens() -> None:
    given, sizes = arrays(), jnp.array([9, 0, 20, 3, 1, 14, 7, 6])
    mesh = typed_mesh("explicit", {"a": 2})

    def result(x: jax.Array) -> jax.Array:
        options: Any = dict(lora=given["gate_up_lora"], precision="highest", out_sharding=PartitionSpec())
        return jg.grouped_dense(x, given["gate_up"], sizes, **options)

    with jax.set_mesh(mesh):
        got = jax.jit(result)(jax.device_put(given["x"], NamedSharding(mesh, PartitionSpec(None, "a"))))
    assert_close(got, result(given["x"]))


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])
def test_kernels_in_fp8_alone_give_the_tokens_the_same_gradient(backend: str, recipe: jg.Recipe) -> None:
    given = arrays()
    features = jg.Lora(*(jnp.tile(factor, (1, 5, 1)) for factor in given["gate_up_lora"]))  # A block and a rest.
    x, kernel = jnp.tile(given["x"], (1, 5)), jnp.tile(given["gate_up"], (1, 5, 1))
    lora = jg.Lora(features.a, given["gate_up_lora"].b)
    sizes = jnp.array([9, 0, 20, 3, 1, 14, 7, 6])

    def loss(x: jax.Array, lora: jg.Lora, cache: jg.KernelCache) -> jax.Array:
        y = jg.grouped_dense(x, None, sizes, recipe=recipe, kernel_cache=cache, lora=lora)
        return jnp.sum(y * jnp.cos(jnp.arange(2 * F)))

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    one, both = (jg.quantize_kernel(kernel, recipe, for_gradients=kept) for kept in (False, True))

    jax.tree.map(np.testing.assert_array_equal, gradient(x, lora, one), gradient(x, lora, both))


def test_nothing_of_the_kernels_gradients_is_computed() -> None:
    layer = jg.linen.MoEMlp(E, F, ROUTER, recipe=BLOCK, cache_kernel=True, lora=LoraConfig(8), dtype=jnp.bfloat16)
    x = jnp.ones((T, K), jnp.bfloat16)
    variables = jg.linen.quantize_for_inference(layer.init(jax.random.key(0), x), BLOCK)

    def loss(lora: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer.apply({**variables, "lora": lora}, x)[0].astype(jnp.float32))

    text = lowered(jax.grad(loss, (0, 1)), variables["lora"], x)

    # Per projection that of the kernel, and those of the two factors, which alone have gradients.
    assert sorted(products(text)) == 6 * ["dgrad"] + 6 * ["fprop"] + 4 * ["wgrad"]
    assert sum("f8E4M3FN" in call for call in custom_calls(text, "jax_grouped_gemm")) == 4


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_adapt_all_kernels_of_experts_and_leave_the_others_alone(kind: str) -> None:
    config = LoraConfig(RANK, scale=1.5, b_init=jax.nn.initializers.normal())
    options: Any = dict(num_experts=E, hidden_features=F, router=ROUTER, shared_features=16)
    x = arrays()["x"]
    layer = jg.linen.MoEMlp(**options, lora=config)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    params = dict(variables["params"])
    for name, factors in variables["lora"].items():
        a, b = factors["lora_a"], 1.5 * factors["lora_b"]
        params[name] = dict(kernel=jg.Lora(a, b).merge(params[name]["kernel"]))
    expected = jax.jit(jg.linen.MoEMlp(**options).apply)({"params": params}, x)[0]
    if kind == "nnx":
        nnx_layer = jg.nnx.MoEMlp(K, **options, lora=config, rngs=nnx.Rngs(1))
        jg.nnx.load_variables(nnx_layer, variables)
        jax.tree.map(np.testing.assert_array_equal, jg.nnx.linen_variables(nnx_layer), dict(variables))

        def loss(layer: Any) -> jax.Array:
            return jnp.sum(layer(x)[0])

        gradients = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(nnx_layer)
        assert {*nnx.to_pure_dict(gradients)} == {*variables["lora"]}
        got = nnx.jit(lambda layer: layer(x)[0])(nnx_layer)
    else:
        got = jax.jit(layer.apply)(variables, x)[0]
        with pytest.raises(ValueError, match=r"^lora needs the collection lora, which init makes"):
            layer.apply({"params": variables["params"]}, x)

    assert np.abs(variables["lora"]["gate_up"]["lora_a"]).max() <= K**-0.5
    assert_close(got, expected)


def test_wrong_adapters_are_refused() -> None:
    x, kernel, sizes = jnp.ones((T, K)), jnp.ones((E, K, F)), jnp.full(E, 8)
    lora = jg.Lora(jnp.ones((E, K, RANK)), jnp.ones((E, RANK, F)))
    refused = {
        "lora must be a jax_grouped.Lora, got ": dict(lora=tuple(lora)),
        "lora must have a [G, K, r] and b [G, r, N] for a kernel ": dict(lora=lora._replace(b=lora.b[:, :2])),
        "lora must have a [G, K, r] and b ": dict(lora=lora._replace(a=lora.a[0])),
        "lora.a's type must be ": dict(lora=lora._replace(a=lora.a.astype(int))),
        "dkernel_accumulator is for kernels that are trained": dict(dkernel_accumulator=kernel),
    }
    assert_refused(jg.grouped_dense, dict(x=x, kernel=kernel, group_sizes=sizes, lora=lora), refused)
    layer = jg.linen.GroupedDense(F, E, lora=LoraConfig(RANK))
    variables = layer.init(jax.random.key(0), x, sizes)
    with pytest.raises(ValueError, match=r"^fwd takes no adapters: call the layer\."):
        layer.apply(variables, x, sizes, method="fwd")
    wide = layer.clone(lora=LoraConfig(2 * RANK))
    with pytest.raises(ValueError, match=r"^lora_a and lora_b must have shapes \(\(8, 32, 8\), \(8, 8, 32\)\), got "):
        wide.apply(variables, x, sizes)
    with pytest.raises(TypeError, match=r"^lora must be a LoraConfig or None, got "):
        jg.linen.GroupedDense(F, E, lora=4)
    with pytest.raises(ValueError, match=r"^rank must be "):
        LoraConfig(0)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "llama4_text", "nemotron_h"])
def test_adapters_of_pefts_target_parameters_compute_the_same_and_come_back(model: str) -> None:
    config, _, block = published_block(model)
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft", reason="needs the extra huggingface: peft")
    base = {name: tensor.numpy() for name, tensor in block.state_dict().items()}
    names = [f"experts.{name}" for name, _ in block.experts.named_parameters() if "bias" not in name]
    tuned = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=names)
    wrapped = peft.get_peft_model(block, tuned)
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = np.random.default_rng(1).standard_normal((2, 10, 32), np.float32)
    result = wrapped(torch.tensor(tokens))
    expected = (result[0] if isinstance(result, tuple) else result).reshape(tokens.shape)
    torch.sum(expected**2).backward()
    state = peft.get_peft_model_state_dict(wrapped)
    trained = {name.replace(".default", ""): parameter for name, parameter in wrapped.named_parameters()}

    layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config), lora=LoraConfig(3, scale=2.0))
    variables = jg.moe.from_huggingface(base, config) | jg.moe.from_peft(state, config, prefix="base_model.model.")

    def loss(lora: Any) -> Any:
        y, _ = layer.apply({**variables, "lora": lora}, tokens)
        return jnp.sum(y**2), y

    if "shared_gate_up" in variables["params"]:  # PEFT has no adapters there.
        assert not variables["lora"]["shared_down"]["lora_b"].any()
    (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["lora"])

    assert_close(y, expected.detach().numpy(), 1e-5)
    written, got = (
        jg.moe.to_peft({"lora": lora}, config, prefix="base_model.model.") for lora in (variables["lora"], gradients)
    )
    assert {*state} <= {*written}
    for name, tensor in state.items():
        np.testing.assert_array_equal(written[name], tensor.numpy(), err_msg=name)
        assert_close(got[name], trained[name].grad.numpy(), 1e-5)


def test_adapters_of_each_linear_layer_add_what_peft_merges() -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft", reason="needs the extra huggingface: peft")
    config = dict(model_type="mixtral", hidden_size=8, intermediate_size=6, num_local_experts=3, num_experts_per_tok=2)

    def linear(inputs: int, outputs: int) -> Any:
        return torch.nn.Linear(inputs, outputs, bias=False)

    def expert() -> Any:
        return torch.nn.ModuleDict(dict(w1=linear(8, 6), w3=linear(8, 6), w2=linear(6, 8)))

    block = torch.nn.Module()
    block.gate, block.experts = linear(8, 3), torch.nn.ModuleList([expert() for _ in range(3)])
    base = jg.moe.from_huggingface(block.state_dict(), config)["params"]
    wrapped = peft.get_peft_model(block, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["w1", "w2", "w3"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    state = peft.get_peft_model_state_dict(wrapped)
    expected = jg.moe.from_huggingface(wrapped.merge_and_unload().state_dict(), config)["params"]

    lora = jg.moe.from_peft(state, config, prefix="base_model.model.")["lora"]

    assert [lora[name]["lora_a"].shape for name in ("gate_up", "down")] == [(3, 8, 2 * 2), (3, 6, 2 * 2)]
    for name, factors in lora.items():
        got = jg.Lora(factors["lora_a"], 1.5 * factors["lora_b"]).merge(base[name]["kernel"])
        assert_close(got, expected[name]["kernel"])
    layer = jg.nnx.MoEMlp(8, **jg.moe.huggingface_options(config), lora=LoraConfig(4, scale=1.5), rngs=nnx.Rngs(0))
    jg.nnx.load_variables(layer, {"lora": lora})
    written = jg.moe.to_peft(jg.nnx.linen_variables(layer), config, prefix="base_model.model.", per_expert=True)
    again = jg.moe.from_peft(written, config, prefix="base_model.model.")["lora"]
    jax.tree.map(np.testing.assert_array_equal, again, lora)
    alone = {name: tensor for name, tensor in state.items() if "experts.1.w1" in name}
    alone |= {name.replace("w1", "w3"): 2 * tensor if "lora_B" in name else tensor for name, tensor in alone.items()}
    joined = jg.moe.from_peft(alone, config, prefix="base_model.model.")["lora"]["gate_up"]
    assert joined["lora_a"].shape == (3, 8, 2)
    assert not joined["lora_a"][[0, 2]].any()
    np.testing.assert_array_equal(joined["lora_b"][1, :, 1], 2 * joined["lora_b"][1, :, 0])
    with pytest.raises(ValueError, match=r"has no place for \['base_model\.model\.gate\.lora_A\.weight'\]"):
        jg.moe.from_peft(
            state | {"base_model.model.gate.lora_A.weight": np.ones(1)}, config, prefix="base_model.model."
        )
