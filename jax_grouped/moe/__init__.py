"""Mixtures of experts without Flax: routing, permutation, the experts, the exchange of rows, and all in one function.

Example:
    x, logits = jnp.ones((8, 32)), jnp.tile(jnp.arange(4.0), (8, 1))
    gate_up, down = jnp.ones((4, 32, 32)), jnp.ones((4, 16, 32))

    routing = jg.moe.top_k_routing(logits, jg.moe.Router(top_k=2))
    permutation = jg.moe.group_by_expert(routing.experts, num_experts=4)
    rows = jg.moe.permute(x, permutation)
    rows = jg.moe.grouped_mlp(rows, gate_up, down, permutation.group_sizes)
    y = jg.moe.unpermute(rows, permutation, routing.weights)

    assert permutation.group_sizes.tolist() == [0, 0, 8, 8] and y.shape == x.shape
"""

from jax_grouped.moe.exchange import Exchange, plan_exchange, return_rows, send_rows
from jax_grouped.moe.experts import grouped_mlp
from jax_grouped.moe.huggingface import (
    from_huggingface,
    from_peft,
    huggingface_options,
    stream_huggingface,
    to_huggingface,
    to_peft,
)
from jax_grouped.moe.layer import MoEMetrics, moe_mlp, router_loss
from jax_grouped.moe.parallel import Parallel
from jax_grouped.moe.permutation import Permutation, group_by_expert, permute, unpermute
from jax_grouped.moe.routing import (
    Router,
    Routing,
    load_balancing_loss,
    router_logits,
    router_z_loss,
    top_k_routing,
    update_selection_bias,
)
from jax_grouped.ops.inputs import Weights

__all__ = [
    "Exchange",
    "MoEMetrics",
    "Parallel",
    "Permutation",
    "Router",
    "Routing",
    "Weights",
    "from_huggingface",
    "from_peft",
    "group_by_expert",
    "grouped_mlp",
    "huggingface_options",
    "load_balancing_loss",
    "moe_mlp",
    "permute",
    "plan_exchange",
    "return_rows",
    "router_logits",
    "router_loss",
    "router_z_loss",
    "send_rows",
    "stream_huggingface",
    "to_huggingface",
    "to_peft",
    "top_k_routing",
    "unpermute",
    "update_selection_bias",
]


def __dir__() -> list[str]:
    return sorted(__all__)
