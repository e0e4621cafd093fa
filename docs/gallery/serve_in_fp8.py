# %% [markdown]
# # Serve in FP8
#
# A model that has been trained in bfloat16 generates text with its experts in
# FP8 alone. The page measures the memory of both, and how far their predictions
# agree.

# %%
import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_grouped as jg

E, K, F = 8, 128, 128  # experts, features, features inside an expert
WINDOW = 16  # bytes that the model reads

# %% [markdown]
# ## A trained model
#
# The model reads 16 bytes of text and predicts the next one. It is in NNX; in
# linen, `jg.linen.quantize_for_inference` does the same with the variables.


# %%
class Model(nnx.Module):
    def __init__(self, recipe=None):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.project = nnx.Linear(32 * WINDOW, K, rngs=rngs)
        self.experts = jg.nnx.MoEMlp(
            K,
            num_experts=E,
            hidden_features=F,
            router=jg.moe.Router(top_k=2),
            recipe=recipe,
            dtype=jnp.bfloat16,
            rngs=rngs,
        )
        self.logits = nnx.Linear(K, 256, rngs=rngs)

    def __call__(self, windows):  # [T, WINDOW]
        x = self.project(self.embed(windows).reshape(len(windows), -1))
        y, metrics = self.experts(x)
        return self.logits(x + y), metrics


# %%
text = np.fromfile(argparse.__file__, np.uint8)
data = np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)
data = np.random.default_rng(0).permutation(data).astype(np.int32)
model = Model()
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, batch):
    def loss(model):
        logits, metrics = model(batch[:, :-1])
        losses = cross_entropy(logits, batch[:, -1])
        return losses.mean() + 0.01 * metrics.balance_loss

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


for batch in data[: 100 * 256].reshape(100, 256, -1):
    value = step(model, optimizer, batch)
print(f"loss of the last step: {value:.2f}")

# %% [markdown]
# ## Quantize
#
# A second model takes the parameters, with a recipe. `quantize_for_inference`
# then replaces the kernels of its experts by FP8 numbers and scales.

# %%
served = Model(jg.Float8BlockScaling())
nnx.update(served, nnx.state(model))
windows, targets = data[-1024:, :-1], data[-1024:, -1]
predict = nnx.jit(lambda model, windows: model(windows)[0])
before = predict(served, windows)

jg.nnx.quantize_for_inference(served)

assert served.experts.down.kernel is None
assert jnp.array_equal(predict(served, windows), before)

# %% [markdown]
# Results stay the same to the bit: before, the layer quantized its kernels to
# these numbers in every call.
#
# ## Memory
#
# FP8 takes one byte per weight. The scales of 128x128 blocks add next to
# nothing.


# %%
def megabytes(layer):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(layer))) / 1e6


trained_mb = megabytes([model.experts.gate_up, model.experts.down])
served_mb = megabytes([served.experts.gate_up, served.experts.down])
print(f"experts as trained, float32: {trained_mb:.2f} MB")
print(f"experts in bfloat16:         {trained_mb / 2:.2f} MB")
print(f"experts in FP8:              {served_mb:.2f} MB")
assert served_mb < 0.26 * trained_mb

# %% [markdown]
# ## Agreement with bfloat16
#
# Both models predict the same held-out bytes.

# %%
log_probabilities = {}
for name, one in (("bfloat16", model), ("FP8", served)):
    scores = jax.nn.log_softmax(predict(one, windows))
    log_probabilities[name] = scores
    loss = -jnp.take_along_axis(scores, targets[:, None], axis=1).mean()
    print(f"held-out loss, {name}: {loss:.4f} nats per byte")

best = [jnp.argmax(scores, axis=1) for scores in log_probabilities.values()]
agreement = jnp.mean(best[0] == best[1])
print(f"same most probable byte: {agreement:.1%}")
assert agreement > 0.95

# %% alt="Log-probabilities in FP8 over those in bfloat16, near the diagonal"
points = [
    jnp.take_along_axis(scores, targets[:, None], axis=1)
    for scores in log_probabilities.values()
]
plt.figure(figsize=(6.5, 4), dpi=150, layout="constrained")
plt.plot([-10, 0], [-10, 0], color="black", linewidth=0.5)
plt.scatter(*points, s=4, alpha=0.5)
plt.xlabel("bfloat16")
plt.ylabel("FP8")
plt.title("Log-probability of the next byte")
plt.show()

# %% [markdown]
# ## Decode
#
# A step of decoding predicts one byte for each of a few sequences. Group sizes
# stay on the device, and no step waits for the host.


# %%
@nnx.jit
def decode(model, windows):
    token = jnp.argmax(model(windows)[0], axis=1)
    return jnp.concatenate([windows[:, 1:], token[:, None]], axis=1), token


starts = [b"        parser.a", b"    def __init__", b"raise ArgumentEr"]
windows, tokens = np.array([list(start) for start in starts]), []
for _ in range(40):
    windows, token = decode(served, windows)
    tokens.append(token)
for start, continuation in zip(starts, np.array(tokens).T, strict=True):
    print((start + bytes(continuation.tolist())).decode().split("\n")[0])

# %% [markdown]
# Reading the weights bounds the speed of decoding. On an H200, a layer with its
# experts in FP8 is [1.2 to 1.7 times as
# fast](../../benchmarks/README.md#decoding). [Serve
# it](../your-model.md#serve-it) has the same in linen, and writes FP8 kernels
# to files. They cannot be trained further, so keep the parameters.
