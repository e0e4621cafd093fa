"""Options of a mixture of experts: `Router` chooses the experts, `Parallel` spreads them over the devices of a mesh."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from jax_grouped.core.values import shown, static_bool, static_number, static_size
from jax_grouped.kernels.routing import Score

#: Choice of the pairs of a token and an expert that are dropped, see `Router`.
DropBy = Literal["even", "weight"]
#: Way in which tokens reach the devices of their experts, see `Parallel`.
ExchangeMethod = Literal["auto", "gather", "padded"]
#: Type in which rows travel between devices, see `Parallel`.
RowType = Literal["fp8", "input"]


@dataclasses.dataclass(frozen=True)
class Router:
    """Options of the choice of each token's experts, of their weights, and of the room that they have.

    With `groups` and `top_groups`, a token's experts come from few groups, as if the groups were nodes of a cluster
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2): the groups with the highest sum of the scores of their two best
    experts. With `score="sigmoid"` and a selection bias that is moved after each step against the experts' loads, this
    is the auxiliary-loss-free balancing of the same section.

    Attributes:
        top_k: experts per token, from 1 to `E`.
        score: "softmax" over the experts, or "sigmoid" of each logit. Sigmoids that float32 does not tell apart are
            chosen by their logits, unless there is a selection bias.
        normalize: whether a token's weights are divided by their sum, rather than being the scores themselves. Sums of
            sigmoids are those of their logarithms, so they are right for logits of any size. Scores that are all 0 stay
            0. With `top_k=1` the quotient is always 1: the router then gets gradients from balance losses only, and
            `normalize=False` gives it those of the weights.
        scale: factor that multiplies the final weights.
        groups: the number of groups of successive experts, a divisor of `E`; None for no groups.
        top_groups: the number of groups that a token's experts may come from. They must have `top_k` experts.
        capacity_factor: room for rows on each device, in multiples of `T * top_k`, the number that a device gets if all
            experts are chosen equally often. Pairs of a token and an expert without room are dropped, and counted. None
            gives room for the worst case, and drops nothing: `T * top_k`, or `D * T * min(top_k, E / D)` with experts
            on `D` devices.
        drop_by: which pairs are dropped on a device with too many. "even" gives all sources and experts the same room:
            the largest groups, of one source for one expert, are cut to one length. Within a group, pairs are dropped
            at equal distances, so that neither early nor late tokens are favoured. "weight" drops those with the
            smallest routing weights, by absolute value.
        use_bias: whether a layer's router adds a bias `[E]` to its logits. Functions get the logits.
        use_selection_bias: whether a layer keeps a `selection_bias` `float32[E]`, which starts at 0, has no gradient,
            and is moved by `update_selection_bias`. Functions then need theirs.
        balance_sequences: whether a layer's balance loss is the mean of the losses of the sequences of `x`
            `[..., length, K]`, see `load_balancing_loss`. `moe_mlp` then needs `num_sequences`.

    Raises:
        TypeError: a field is not of its type.
        ValueError: a field has a value that is not supported.

    Example:
        router = jg.moe.Router(top_k=2, score="sigmoid", scale=2.5)

        routing = jg.moe.top_k_routing(jnp.array([[0.0, 2.0, 2.0]]), router)

        assert routing.experts.tolist() == [[1, 2]] and routing.weights.tolist() == [[1.25, 1.25]]
    """

    top_k: int
    _: dataclasses.KW_ONLY
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    top_groups: int | None = None
    capacity_factor: float | None = None
    drop_by: DropBy = "even"
    use_bias: bool = False
    use_selection_bias: bool = False
    balance_sequences: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("top_k", static_size("top_k", self.top_k, least=1))
        check_choice("score", self.score, get_args(Score))
        check_choice("drop_by", self.drop_by, get_args(DropBy))
        for name in ("normalize", "use_bias", "use_selection_bias", "balance_sequences"):
            put(name, static_bool(name, getattr(self, name)))
        put("scale", static_number("scale", self.scale))
        if (self.groups is None) != (self.top_groups is None):
            raise ValueError(f"groups and top_groups need each other, got {self.groups} and {self.top_groups}.")
        if self.groups is not None:
            groups, top_groups = (static_size(name, getattr(self, name), least=1) for name in ("groups", "top_groups"))
            put("groups", groups)
            put("top_groups", top_groups)
            if top_groups > groups:
                raise ValueError(f"top_groups must be at most the {groups} groups, got {top_groups}.")
        if self.capacity_factor is not None:
            put("capacity_factor", static_number("capacity_factor", self.capacity_factor))
            if not 0 < self.capacity_factor < math.inf:
                raise ValueError(
                    "capacity_factor must be a positive number, or None for the worst case, got "
                    f"{self.capacity_factor}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Options of a mixture of experts on several devices: what each mesh axis splits, and how rows travel.

    `experts` splits the experts and the tokens: these travel to their experts' devices, and results travel back.
    `features` splits `F`, the features inside an expert: each device has a part of the gate's features, then a part of
    up's, and the results are summed over the axis. Inside `jax.shard_map` their gradients need its checks on
    (`check_vma=True`). `fsdp` splits the tokens, and the storage of the experts: each pass gathers the kernels of all
    its devices, with a recipe as FP8 numbers, and each device gets its part of the sum of their gradients. Axes that
    split only tokens are named in `batch` alone.

    Attributes:
        experts: mesh axis over which the experts are split.
        features: mesh axis over which `F` is split.
        fsdp: mesh axis over which the storage of the experts is split: those along `experts` are split again. The parts
            are in the order of `P((experts, fsdp))`.
        batch: mesh axes that split the tokens of one batch; the balance loss is then that of the whole batch. Inside
            `jax.shard_map`, name `experts` and `fsdp` here too.
        exchange: "gather" gathers the tokens of all `D` devices on each, which applies its own experts to them, and
            sums the results of each token: `T` rows travel from each device to each other one. "padded" exchanges a row
            for each pair of a token and a choice, in room for the worst case, see `plan_exchange`: `top_k` times as
            many rows. "auto" is "gather".
        dispatch: type of tokens, and of gradients of results, on their way to the experts. "fp8" is that of a
            `Float8BlockScaling` with `pow2_scales`, and halves their bytes; without such a recipe they travel as they
            are. The kernels' gradients then come from tokens and gradients that were rounded along the features before
            they are rounded along the rows. "input" is the type of `x`.
        combine: likewise of results, and of gradients of tokens, on their way back. With "fp8", each device's part of a
            token's sum, or with exchanged rows each choice's result, is rounded to FP8.

    Raises:
        TypeError: an axis is no name of a mesh axis.
        ValueError: axes that must differ are the same, or a field has a value that is not supported.

    Example:
        parallel = jg.moe.Parallel(experts="expert", fsdp="data")

        assert parallel.token_axes == ("data", "expert") and parallel.storage_axes == ("expert", "data")
    """

    experts: str | None = None
    features: str | None = None
    fsdp: str | None = None
    batch: Sequence[str] = ()
    exchange: ExchangeMethod = "auto"
    dispatch: RowType = "fp8"
    combine: RowType = "input"

    def __post_init__(self) -> None:
        for name in ("experts", "features", "fsdp"):
            axis = getattr(self, name)
            if axis is not None and not isinstance(axis, str):
                raise TypeError(f"{name} must be the name of one mesh axis, got {axis!r}.")
        batch = (self.batch,) if isinstance(self.batch, str) else self.batch
        if not isinstance(batch, Sequence) or not all(isinstance(axis, str) for axis in batch):
            raise TypeError(f"batch must be a sequence of names of mesh axes, got {batch!r}.")
        object.__setattr__(self, "batch", tuple(batch))
        if self.features is not None and self.features in self.token_axes:
            raise ValueError(
                f"The features axis {self.features!r} must be none of experts, fsdp and batch, because its devices "
                f"have the same tokens, got {self.experts!r}, {self.fsdp!r} and {self.batch}."
            )
        if self.fsdp is not None and self.fsdp == self.experts:
            raise ValueError(
                f"fsdp must be another axis than experts, got {self.fsdp!r} for both: experts alone splits the experts "
                "and their storage."
            )
        if len({*batch}) < len(batch):
            raise ValueError(f"batch must be different axes, got {self.batch}.")
        check_choice("exchange", self.exchange, get_args(ExchangeMethod))
        for name in ("dispatch", "combine"):
            check_choice(name, getattr(self, name), get_args(RowType))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens."""
        more = (axis for axis in (self.fsdp, self.experts) if axis is not None and axis not in self.batch)
        return (*self.batch, *more)

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes that split the storage of the experts, in the order of its parts."""
        return tuple(axis for axis in (self.experts, self.fsdp) if axis is not None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split anything."""
        return self.token_axes if self.features is None else (*self.token_axes, self.features)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def check_instance(name: str, value: object, cls: type) -> None:
    """Raises TypeError unless `value` is a `cls`, a public class of `jax_grouped.moe`."""
    if not isinstance(value, cls):
        raise TypeError(f"{name} must be a jax_grouped.moe.{cls.__name__}, got {shown(value)}.")
