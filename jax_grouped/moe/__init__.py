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

from jax_grouped.moe.exchange import Exchange as Exchange
from jax_grouped.moe.exchange import plan_exchange as plan_exchange
from jax_grouped.moe.exchange import return_rows as return_rows
from jax_grouped.moe.exchange import send_rows as send_rows
from jax_grouped.moe.experts import grouped_mlp as grouped_mlp
from jax_grouped.moe.huggingface import from_huggingface as from_huggingface
from jax_grouped.moe.huggingface import huggingface_options as huggingface_options
from jax_grouped.moe.huggingface import to_huggingface as to_huggingface
from jax_grouped.moe.layer import MoEMetrics as MoEMetrics
from jax_grouped.moe.layer import moe_mlp as moe_mlp
from jax_grouped.moe.options import Parallel as Parallel
from jax_grouped.moe.options import Router as Router
from jax_grouped.moe.permutation import Permutation as Permutation
from jax_grouped.moe.permutation import group_by_expert as group_by_expert
from jax_grouped.moe.permutation import permute as permute
from jax_grouped.moe.permutation import unpermute as unpermute
from jax_grouped.moe.routing import Routing as Routing
from jax_grouped.moe.routing import load_balancing_loss as load_balancing_loss
from jax_grouped.moe.routing import router_logits as router_logits
from jax_grouped.moe.routing import router_z_loss as router_z_loss
from jax_grouped.moe.routing import top_k_routing as top_k_routing
from jax_grouped.moe.routing import update_selection_bias as update_selection_bias
from jax_grouped.ops.inputs import Weights as Weights

__all__ = [
    "Exchange",
    "MoEMetrics",
    "Parallel",
    "Permutation",
    "Router",
    "Routing",
    "Weights",
    "from_huggingface",
    "group_by_expert",
    "grouped_mlp",
    "huggingface_options",
    "load_balancing_loss",
    "moe_mlp",
    "permute",
    "plan_exchange",
    "return_rows",
    "router_logits",
    "router_z_loss",
    "send_rows",
    "to_huggingface",
    "top_k_routing",
    "unpermute",
    "update_selection_bias",
]


def __dir__() -> list[str]:
    return sorted(__all__)
