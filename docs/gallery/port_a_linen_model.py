# %% [markdown]
# # Port a linen model
#
# A small language model has two `nn.Dense` per expert. It becomes a model with
# `jg.linen.MoEMlp`, keeps its parameters and its loss curve, and then trains in
# FP8.
#
# The experts of the loop see all tokens, and most of their results are
# multiplied by zero. Grouped matmuls give each expert its own tokens only.

# %%
import argparse
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jax_grouped as jg

E, K, F = 8, 64, 128  # experts, features, features inside an expert
WINDOW = 16  # bytes that the model reads

# %% [markdown]
# ## The model as it is
#
# The router chooses two experts for each token, and divides their weights by
# the sum.


# %%
class LoopedExperts(nn.Module):
    @nn.compact
    def __call__(self, x):  # [T, K]
        scores = jax.nn.softmax(nn.Dense(E, use_bias=False, name="router")(x))
        weights, chosen = jax.lax.top_k(scores, 2)
        weights /= weights.sum(axis=1, keepdims=True)
        y = 0
        for e in range(E):
            hidden = nn.gelu(nn.Dense(F, use_bias=False, name=f"up_{e}")(x))
            result = nn.Dense(K, use_bias=False, name=f"down_{e}")(hidden)
            weight = jnp.sum(weights * (chosen == e), axis=1, keepdims=True)
            y += weight * result
        return y


# %% [markdown]
# The model reads 16 bytes of text and predicts the next one.


# %%
class Model(nn.Module):
    make_experts: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, tokens):  # [T, WINDOW]
        x = nn.Embed(256, 32)(tokens).reshape(len(tokens), -1)
        x = nn.Dense(K)(x)
        y = self.make_experts(name="experts")(nn.RMSNorm()(x))
        if isinstance(y, tuple):  # MoEMlp returns metrics beside the result
            y, _ = y
        return nn.Dense(256)(nn.RMSNorm()(x + y))


# %% [markdown]
# The text is the source of a module of Python. Every model below sees the same
# batches.

# %%
text = np.fromfile(argparse.__file__, np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)
rng = np.random.default_rng(0)
batches = windows[rng.integers(len(windows), size=(60, 256))].astype(np.int32)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def train(model, params):
    optimizer = optax.adam(3e-3)

    def step(carry, batch):
        def loss(params):
            logits = model.apply({"params": params}, batch[:, :-1])
            return cross_entropy(logits, batch[:, -1]).mean()

        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), value

    start = params, optimizer.init(params)
    return jax.jit(lambda start: jax.lax.scan(step, start, batches)[1])(start)


# %%
looped = Model(LoopedExperts)
params = jax.jit(looped.init)(jax.random.key(0), batches[0, :, :-1])["params"]
looped_losses = train(looped, params)

print(f"loss of the loop: {looped_losses[0]:.3f} to {looped_losses[-1]:.3f}")

# %% [markdown]
# ## The port
#
# One layer replaces router, loop and sum. `activation="gelu"` is an expert
# without a gate; the default is SwiGLU. If weights are not divided by their
# sum, the router has `normalize=False`.
#
# If the layers have biases, `MoEMlp` has `use_bias=True`, and the router
# `jg.moe.Router(top_k=2, use_bias=True)`.

# %%
router = jg.moe.Router(top_k=2)
options = dict(
    num_experts=E, hidden_features=F, router=router, activation="gelu"
)


def make_experts(**arguments):
    return jg.linen.MoEMlp(**options, **arguments)


ported = Model(make_experts)

# %% [markdown]
# Stacking turns the parameters of a checkpoint into those of the port, and each
# of Adam's moments, `mu` and `nu`, in the same way.


# %%
def stacked(params):
    old = params["experts"]
    new = {"router": old["router"]}
    for theirs, ours in (("up", "gate_up"), ("down", "down")):
        experts = [old[f"{theirs}_{e}"] for e in range(E)]
        new[ours] = jax.tree.map(lambda *arrays: jnp.stack(arrays), *experts)
    return params | {"experts": new}


ported_losses = train(ported, stacked(params))
difference = jnp.max(jnp.abs(ported_losses - looped_losses))
assert difference < 1e-4

print(f"loss of the port: {ported_losses[0]:.3f} to {ported_losses[-1]:.3f}")
print(f"largest difference between the curves: {difference:.1e}")

# %% [markdown]
# ## FP8 in one more argument
#
# The recipe of DeepSeek-V3 quantizes tokens, weights and gradients of the
# experts. Parameters stay float32. Rounding changes a result by some percent,
# and the choice of later layers where it is close. [Recipes](../recipes.md)
# compares the others, and says from how many tokens on FP8 is faster.

# %%
options |= dict(recipe=jg.Float8BlockScaling())

fp8_losses = train(Model(make_experts), stacked(params))
assert abs(fp8_losses[-1] - ported_losses[-1]) < 0.05

print(f"loss in FP8: {fp8_losses[0]:.3f} to {fp8_losses[-1]:.3f}")

# %% alt="Three loss curves: loop and port are one line, and FP8 is close to it"
plt.figure(figsize=(6.5, 3.5), dpi=150, layout="constrained")
plt.plot(looped_losses, label="loop over nn.Dense", linewidth=6, alpha=0.3)
plt.plot(ported_losses, label="MoEMlp")
plt.plot(fp8_losses, label="MoEMlp, FP8", linestyle="--")
plt.xlabel("step")
plt.ylabel("loss, nats per byte")
plt.title("The port has the loss curve of the loop, and FP8 follows it")
plt.legend()
plt.show()

# %% [markdown]
# A model that calls `jax.lax.ragged_dot` needs even less: `jg.ragged_dot` has
# the same arguments. [Migration](../migration.md) goes through it line by line.
# The [benchmarks](../../benchmarks/README.md) have the speed of layers on a
# GPU.
