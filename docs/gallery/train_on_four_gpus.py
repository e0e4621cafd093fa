# %% [markdown]
# # Train on four GPUs
#
# A model trains on a mesh of two by two devices with plain `jax.jit`: tokens
# are split over all of them, experts over two. The losses are those of one
# device. FSDP, which stores the experts in four parts, is one more argument.
#
# JAX makes four devices of the CPU where there are no GPUs, as on this page.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)  # GPUs are what they are

import argparse

import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg

axes, auto = ("data", "expert"), (AxisType.Auto, AxisType.Auto)
mesh = jax.make_mesh((2, 2), axes, auto, devices=jax.devices()[:4])
print(mesh.devices)

# %% [markdown]
# ## The model
#
# `jg.moe.Parallel` says what the axes of the mesh split, and `logical_axes`
# names the axes of the experts' kernels, so that rules of Flax can place them.
# The model reads 16 bytes and predicts the next one.


# %%
class Model(nn.Module):
    parallel: jg.moe.Parallel
    recipe: jg.Recipe | None = None

    @nn.compact
    def __call__(self, windows):  # [T, 16]
        x = nn.Embed(256, 16)(windows).reshape(len(windows), -1)
        experts = jg.linen.MoEMlp(
            num_experts=8,
            hidden_features=128,
            router=jg.moe.Router(top_k=2),
            parallel=self.parallel,
            recipe=self.recipe,
            logical_axes=("expert", "embed", "mlp"),
        )
        y, metrics = experts(nn.RMSNorm()(x))
        return nn.Dense(256)(nn.RMSNorm()(x + y)), metrics


# %% [markdown]
# ## The training loop
#
# The loop knows nothing of devices. `jax.jit` splits it as its arguments are
# split.

# %%
text = np.fromfile(argparse.__file__, np.uint8)
data = np.lib.stride_tricks.sliding_window_view(text, 17)
data = np.random.default_rng(0).permutation(data).astype(np.int32)
batches = data[: 40 * 128].reshape(40, 128, 17)
optimizer = optax.adam(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def train(model, variables, batches):
    def step(carry, batch):
        def loss(variables):
            logits, metrics = model.apply(variables, batch[:, :-1])
            losses = cross_entropy(logits, batch[:, -1])
            return losses.mean() + 0.01 * metrics.balance_loss

        variables, state = carry
        value, gradients = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(variables, updates), state), value

    start = variables, optimizer.init(variables)
    (variables, _), losses = jax.lax.scan(step, start, batches)
    return variables, losses


train = jax.jit(train, static_argnums=0)

# %% [markdown]
# ## One device
#
# `init` makes the whole parameters, with the names of their axes in boxes.

# %%
alone = Model(jg.moe.Parallel())
boxed = jax.jit(alone.init)(jax.random.key(0), batches[0, :, :-1])
variables = nn.unbox(boxed)

_, expected = train(alone, variables, batches)
print(f"one device: {expected[0]:.4f} to {expected[-1]:.4f}")

# %% [markdown]
# ## Two by two devices
#
# Rules map the names to axes of the mesh. Parameters without names are on all
# devices.

# %%
split = jax.device_put(batches, NamedSharding(mesh, P(None, axes)))


def on_mesh(experts_on):
    rules = (("expert", experts_on), ("embed", None), ("mlp", None))
    specs = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    return jax.device_put(variables, shardings)


model = Model(jg.moe.Parallel(experts="expert", batch=("data",)))
trained, losses = train(model, on_mesh("expert"), split)

difference = jnp.abs(losses - expected).max()
print(f"four devices: {losses[0]:.4f} to {losses[-1]:.4f}")
print(f"largest difference: {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# ## FSDP in one argument
#
# `fsdp="data"` stores each device's experts in parts, over the devices that had
# copies of them. Each pass gathers what it reads.

# %%
fsdp_model = Model(jg.moe.Parallel(experts="expert", fsdp="data"))
stored, fsdp_losses = train(fsdp_model, on_mesh(axes[::-1]), split)

for name, tree in (("copies", trained), ("parts", stored)):
    for shard in tree["params"]["MoEMlp_0"]["down"][
        "kernel"
    ].addressable_shards:
        print(f"{name}: device {shard.device.id} has experts", end=" ")
        print(*range(8)[shard.index[0]], f"in {shard.data.nbytes // 1024} KiB")
assert jnp.abs(fsdp_losses - expected).max() < 1e-3

# %% [markdown]
# ## FP8
#
# Each device quantizes its part with a recipe, and weights and tokens travel in
# FP8.

# %%
fp8_model = Model(fsdp_model.parallel, jg.Float8BlockScaling())
_, fp8_losses = train(fp8_model, on_mesh(axes[::-1]), split)
assert abs(fp8_losses[-1] - expected[-1]) < 0.1

# %% alt="Four loss curves: three are one line, and FP8 is close to it"
plt.figure(figsize=(6.5, 3.5), dpi=150, layout="constrained")
plt.plot(expected, label="one device", linewidth=6, alpha=0.3)
plt.plot(losses, label="four devices", linewidth=3, alpha=0.6)
plt.plot(fsdp_losses, label="four devices, FSDP")
plt.plot(fp8_losses, label="four devices, FSDP, FP8", linestyle="--")
plt.xlabel("step")
plt.ylabel("loss")
plt.title("Four devices compute the losses of one")
plt.legend()
plt.show()

# %% [markdown]
# [Parallelism](../parallelism.md) has tensor parallelism, a capacity,
# `jax.shard_map`, NNX, and several hosts.
