# %% [markdown]
# # Write your own rule
#
# A recipe decides how all three products of an expert are quantized. This page
# makes another choice: the forward pass and the gradient of the tokens are in
# FP8, and the gradient of the weights, which an optimizer adds up, is in the
# type of the tokens.
#
# `jg.grouped_quantize` makes the FP8 arrays, `jg.scaled_ragged_dot` multiplies
# them, and `jax.custom_vjp` puts them together.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jax_grouped as jg

T, K, N, E = 512, 256, 128, 4  # tokens, features in, features out, experts

# %% [markdown]
# ## Quantize
#
# A product sums over one axis, and its scales are along this axis. Tokens are
# quantized along their features, `rowwise`. A stack of weights is needed in
# both orientations: `columnwise` for the forward pass, `rowwise` for the
# gradient of the tokens.

# %%
BLOCK = jg.ScalingMode.BLOCK_1D  # 128 numbers of a row share a scale
TILE = jg.ScalingMode.BLOCK_2D  # 128 x 128 numbers of a weight matrix do

x = jax.random.normal(jax.random.key(0), (T, K), jnp.bfloat16)
kernel = jax.random.normal(jax.random.key(1), (E, K, N)) / K**0.5
group_sizes = jnp.array([200, 0, 212, 80])  # 492 rows; the last 20 are padding

tokens = jg.grouped_quantize(x, group_sizes, BLOCK).rowwise
weights = jg.grouped_quantize(kernel, None, TILE, columnwise=True)
print("tokens: ", tokens.dtype, tokens.shape)
print(
    "weights:", weights.rowwise.dtype, weights.rowwise.shape, "and transposed"
)

# %% [markdown]
# ## The rule
#
# The forward function returns what the backward function needs: the FP8
# weights, and the tokens as they were. The gradient of the group sizes is None.


# %%
@jax.custom_vjp
def dense(x, kernel, group_sizes):
    return forward(x, kernel, group_sizes)[0]


def forward(x, kernel, group_sizes):
    tokens = jg.grouped_quantize(x, group_sizes, BLOCK).rowwise
    weights = jg.grouped_quantize(kernel, None, TILE, columnwise=True)
    y = jg.scaled_ragged_dot(tokens, weights.columnwise, group_sizes)
    return y, (x, kernel, weights.rowwise, group_sizes)


def backward(residuals, dy):
    x, kernel, weights, group_sizes = residuals
    gradients = jg.grouped_quantize(dy, group_sizes, BLOCK).rowwise
    dx = jg.scaled_ragged_dot(gradients, weights, group_sizes)

    def in_16_bits(kernel):
        return jg.grouped_dense(x, kernel, group_sizes)

    (dkernel,) = jax.vjp(in_16_bits, kernel)[1](dy)
    return dx, dkernel, None


dense.defvjp(forward, backward)

# %% [markdown]
# ## How exact it is
#
# Each function below computes the three products from the same numbers. The
# reference multiplies in float32, and the recipe is that of DeepSeek-V3.


# %%
def float32(x, kernel, group_sizes):
    x = x.astype(jnp.float32)
    return jg.grouped_dense(x, kernel, group_sizes, precision="highest")


def recipe(x, kernel, group_sizes):
    blocks = jg.Float8BlockScaling()
    return jg.grouped_dense(x, kernel, group_sizes, recipe=blocks)


dy = jax.random.normal(jax.random.key(2), (T, N), jnp.bfloat16)


def products(function):
    @jax.jit
    def run(x, kernel, dy):
        def product(x, kernel):
            return function(x, kernel, group_sizes)

        y, pull_back = jax.vjp(product, x, kernel)
        return y, *pull_back(dy.astype(y.dtype))

    return [array.astype(jnp.float32) for array in run(x, kernel, dy)]


def errors(function):
    pairs = zip(products(function), reference, strict=True)
    return [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]


reference = products(float32)
functions = {"bfloat16": jg.grouped_dense, "recipe": recipe, "own rule": dense}
measured = {name: errors(function) for name, function in functions.items()}
for name, values in measured.items():
    print(f"{name:8}", *(f"{value:.2%}" for value in values))

assert max(measured["own rule"][:2]) < 0.05
assert measured["own rule"][2] < 0.01 < measured["recipe"][2]

# %% alt="Errors: the rule has bfloat16's for dkernel, the recipe's otherwise"
positions = np.arange(3)
plt.figure(figsize=(6.5, 3), dpi=150, layout="constrained")
for i, (name, values) in enumerate(measured.items()):
    plt.bar(positions + 0.27 * i, 100 * np.array(values), 0.25, label=name)
plt.xticks(positions + 0.27, ["y", "dx", "dkernel"])
plt.ylim(0, 5)
plt.ylabel("error, % of the norm")
plt.title("The own rule keeps the weight gradient exact (lower is better)")
plt.legend(ncols=3)
plt.show()

# %% [markdown]
# ## Train with it
#
# The rule is a function of arrays like any other: it works under `jax.jit`, and
# in the layers of a model. Here it finds weights from their results `y`. The
# rows of no group are zero in `y` and in `dx`, so the padding needs no mask.


# %%
def train(function):
    optimizer = optax.adam(3e-3)

    def step(carry, _):
        def loss(kernel):
            y = function(x, kernel, group_sizes)
            return jnp.mean((y - reference[0]) ** 2)

        fitted, state = carry
        value, gradient = jax.value_and_grad(loss)(fitted)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(fitted, updates), state), value

    start = jnp.zeros_like(kernel), optimizer.init(kernel)
    return jax.jit(lambda start: jax.lax.scan(step, start, length=60)[1])(start)


for name, function in functions.items():
    losses = train(function)
    print(f"{name:8} {losses[0]:.3f} to {losses[-1]:.5f}")
    assert losses[-1] < 0.02 * losses[0]

# %% [markdown]
# [Quantization](../reference/quantization.md) has all modes: a scale for each
# expert, powers of two, scales that you give (delayed scaling), and e5m2 for
# gradients. On several devices, call such a rule inside `jax.shard_map`
# ([parallelism](../parallelism.md)).
