"""Mixtures of experts without Flax: routing, permutation, the experts and their exchange, and all in one function."""

from jax_grouped.dense_inputs import Weights as Weights
from jax_grouped.moe.exchange import Exchange as Exchange
from jax_grouped.moe.exchange import plan_exchange as plan_exchange
from jax_grouped.moe.exchange import return_rows as return_rows
from jax_grouped.moe.exchange import send_rows as send_rows
from jax_grouped.moe.layer import MoEMetrics as MoEMetrics
from jax_grouped.moe.layer import moe_mlp as moe_mlp
from jax_grouped.moe.mlp import grouped_mlp as grouped_mlp
from jax_grouped.moe.permutation import Permutation as Permutation
from jax_grouped.moe.permutation import group_by_expert as group_by_expert
from jax_grouped.moe.permutation import permute as permute
from jax_grouped.moe.permutation import unpermute as unpermute
from jax_grouped.moe.routing import Routing as Routing
from jax_grouped.moe.routing import load_balancing_loss as load_balancing_loss
from jax_grouped.moe.routing import top_k_routing as top_k_routing
