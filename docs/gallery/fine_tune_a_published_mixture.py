# %% [markdown]
# # Fine-tune a published mixture
#
# A checkpoint in the format of Hugging Face becomes the variables of a linen
# model. Its experts are then in memory in FP8 alone, adapters of low rank
# (LoRA) train over them, and the result is written back under its published
# names.

# %%
import argparse
import json
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import jax_grouped as jg

# %% [markdown]
# ## A checkpoint on disk
#
# A file of random weights stands for a download. It has the names and shapes of
# Qwen3-MoE: two layers of eight experts, and no attention, which loads as
# before.

# %%
folder = Path(tempfile.mkdtemp())
config = dict(
    model_type="qwen3_moe",
    num_hidden_layers=2,
    hidden_size=128,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
(folder / "config.json").write_text(json.dumps(config))

BLOCK = "model.layers.{}.mlp."  # what the names of a layer's arrays begin with
tables = ("model.embed_tokens.weight", "lm_head.weight")
shapes = dict.fromkeys(tables, (256, 128))
for i in range(2):
    shapes[BLOCK.format(i) + "gate.weight"] = (8, 128)
    for expert in range(8):
        for name in ("gate_proj", "up_proj", "down_proj"):
            part = f"experts.{expert}.{name}.weight"
            shapes[BLOCK.format(i) + part] = (128, 128)
rng = np.random.default_rng(0)
published = {
    name: rng.normal(scale=shape[1] ** -0.5, size=shape).astype(jnp.bfloat16)
    for name, shape in shapes.items()
}
save_file(published, folder / "model.safetensors")

# %% [markdown]
# ## Load it
#
# `config.json` gives the arguments of the layer. FP8 and adapters are two more.

# %%
config = json.loads((folder / "config.json").read_text())
recipe = jg.Float8BlockScaling()
options = jg.moe.huggingface_options(config)
options |= dict(recipe=recipe, dtype=jnp.bfloat16, cache_kernel=True)
adapters = jg.linen.LoraConfig(rank=8, scale=2.0)
layers = range(config["num_hidden_layers"])


class Model(nn.Module):
    lora: jg.linen.LoraConfig | None = None

    @nn.compact
    def __call__(self, tokens):  # [batch, length]
        x = nn.Embed(256, 128, name="embed_tokens")(tokens)
        for i in layers:
            mlp = jg.linen.MoEMlp(**options, lora=self.lora, name=f"mlp_{i}")
            x = x + mlp(nn.RMSNorm(use_scale=False)(x))[0]
        head = nn.Dense(256, use_bias=False, name="lm_head")
        return head(nn.RMSNorm(use_scale=False)(x))


# %% [markdown]
# `from_huggingface` gives the variables of a layer from its part of the file,
# as NumPy arrays on the host. If a model lies in several files, take the union
# of their arrays.


# %%
def load(state):
    params = {"lm_head": {"kernel": state["lm_head.weight"].T}}
    params["embed_tokens"] = {"embedding": state["model.embed_tokens.weight"]}
    for i in layers:
        block = jg.moe.from_huggingface(state, config, prefix=BLOCK.format(i))
        params[f"mlp_{i}"] = block["params"]
    return params


state = load_file(folder / "model.safetensors")
params = load(state)

# %% [markdown]
# ## Experts in FP8 alone
#
# The collection `kernel_cache` tells which kernels to quantize; its shapes
# suffice. `frozen` has these in FP8, and no other copy of them. `init` also
# makes the adapters.

# %%
model, tokens = Model(adapters), jnp.zeros((1, 16), jnp.int32)
caches = jax.eval_shape(model.init, jax.random.key(0), tokens)["kernel_cache"]
variables = {"params": params, "kernel_cache": caches}
frozen = jg.linen.quantize_for_inference(variables, recipe)
lora = jax.jit(lambda key: model.init(key, tokens)["lora"])(jax.random.key(0))


def megabytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e6


pair = ("gate_up", "down")
experts = [params[f"mlp_{i}"][name] for i in layers for name in pair]
print(f"experts in bfloat16: {megabytes(experts):.2f} MB")
print(f"experts in FP8:      {megabytes(frozen['kernel_cache']):.2f} MB")
print(f"adapters, float32:   {megabytes(lora):.2f} MB")
assert megabytes(frozen["kernel_cache"]) < 0.51 * megabytes(experts)

# %% [markdown]
# ## Train the adapters
#
# The step differentiates the collection `lora` alone. The task is to predict
# the next byte of a module's source from one byte, as far as the adapters can
# bring random weights.

# %%
text = np.fromfile(argparse.__file__, np.uint8)
batches = text[: 40 * 16 * 65].reshape(40, 16, 65).astype(np.int32)
optimizer = optax.adam(1e-2)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def mean_loss(model, variables, batch):
    logits = model.apply(variables, batch[:, :-1])
    return cross_entropy(logits, batch[:, 1:]).mean()


def loss(lora, batch):
    return mean_loss(model, {**frozen, "lora": lora}, batch)


@jax.jit
def step(lora, optimizer_state, batch):
    value, gradients = jax.value_and_grad(loss)(lora, batch)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state)
    return optax.apply_updates(lora, updates), optimizer_state, value


optimizer_state, losses = optimizer.init(lora), []
for batch in batches:
    lora, optimizer_state, value = step(lora, optimizer_state, batch)
    losses.append(value)
adapted_loss = step(lora, optimizer_state, batches[-1])[2]

print(f"loss: {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")
assert losses[-1] < 0.75 * losses[0]

# %% [markdown]
# ## Export the adapters
#
# They get the names of PEFT, with a pair of factors for each linear layer of
# each expert. vLLM loads them beside the published checkpoint.

# %%
adapter = {}
for i in layers:
    place = dict(prefix="base_model.model." + BLOCK.format(i), per_expert=True)
    adapter |= jg.moe.to_peft({"lora": lora[f"mlp_{i}"]}, config, **place)
save_file(adapter, folder / "adapter_model.safetensors")
settings = dict(peft_type="LORA", r=8, lora_alpha=16)
settings |= dict(target_modules=["gate_proj", "up_proj", "down_proj"])
(folder / "adapter_config.json").write_text(json.dumps(settings))

print(len(adapter), "arrays, such as")
print(next(iter(adapter)))

# %% [markdown]
# ## Export a merged checkpoint
#
# Instead, each adapter can be added to its published kernel. The file then has
# the names and shapes of the first one. Read back, it has the loss of the
# adapted model.

# %%
merged = dict(state)
for i in layers:
    block = dict(params[f"mlp_{i}"])
    for name, factors in lora[f"mlp_{i}"].items():
        ab = jg.Lora(factors["lora_a"], adapters.scale * factors["lora_b"])
        block[name] = {"kernel": ab.merge(block[name]["kernel"])}
    place = dict(prefix=BLOCK.format(i), per_expert=True)
    merged |= jg.moe.to_huggingface({"params": block}, config, **place)
save_file(merged, folder / "merged.safetensors")

written = load_file(folder / "merged.safetensors")
jitted = jax.jit(mean_loss, static_argnums=0)
merged_loss = jitted(Model(), {"params": load(written)}, batches[-1])
print(f"last batch: adapters {adapted_loss:.3f}, merged {merged_loss:.3f}")
assert written.keys() == state.keys()
assert abs(merged_loss - adapted_loss) < 0.1

# %% [markdown]
# [Your model](../your-model.md) lists the 55 kinds of models that load like
# this one. It also trains all parameters, replays a recorded choice of experts,
# and writes FP8.
