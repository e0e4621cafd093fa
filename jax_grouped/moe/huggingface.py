"""Weights of published mixture-of-experts models, between the names of Hugging Face and those of `MoEMlp`.

This is NumPy alone: neither `torch` nor `transformers` is needed. A state is a mapping of names to arrays, as
`safetensors.numpy.load_file` returns it, or of tensors, as `safetensors.torch.load_file` does, which knows FP8 too. The
block's names come after a prefix such as `"model.layers.0.mlp."`.
"""

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_grouped.kernels.activations import SwiGLU
from jax_grouped.moe.routing import Router

#: Numbers of FP4 (e2m1) by their four bits.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """The names of one kind of block."""

    router: str = "gate"
    #: Those of an expert's gate, up and down, where each expert has arrays of its own.
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    #: Key of the configuration that has `F`.
    hidden: str = "moe_intermediate_size"
    #: Whether kernels are `[E, in, out]` and gate and up alternate; then experts and router have biases.
    interleaved: bool = False
    #: Whether sigmoids with a selection bias choose the experts, beside any that all tokens share.
    selects: bool = False
    #: Whether weights are divided by their sum; None if the configuration says.
    normalizes: bool | None = None


_ARCHITECTURES = {
    "mixtral": _Architecture(projections=("w1", "w3", "w2"), hidden="intermediate_size", normalizes=True),
    "qwen3_moe": _Architecture(),
    "olmoe": _Architecture(hidden="intermediate_size"),
    "deepseek_v3": _Architecture(selects=True),
    "gpt_oss": _Architecture("router", hidden="intermediate_size", interleaved=True, normalizes=True),
}


def huggingface_options(config: Any) -> dict[str, Any]:
    """Returns the arguments with which `MoEMlp` is the block of a published model.

    Args:
        config: the model's `config.json` as a mapping, or a configuration of `transformers`. Its `model_type` is
            "mixtral", "qwen3_moe", "olmoe", "deepseek_v3" or "gpt_oss".

    Returns:
        Keywords of `jg.linen.MoEMlp` and, after the features `config["hidden_size"]`, of `jg.nnx.MoEMlp`.

    Raises:
        KeyError: the configuration lacks a value.
        ValueError: it is of another model, or has a value with which the layer cannot compute.

    Example:
        config = dict(
            model_type="mixtral", hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2
        )

        layer = jg.linen.MoEMlp(**jg.moe.huggingface_options(config))

        assert layer.hidden_features == 16
    """
    values, architecture, sizes = _known(config)
    normalize = architecture.normalizes
    router: dict[str, Any] = dict(normalize=_value(values, "norm_topk_prob") if normalize is None else normalize)
    options: dict[str, Any] = dict(num_experts=sizes.experts, hidden_features=sizes.hidden)
    if architecture.interleaved:
        # A configuration may leave these to the model's code.
        alpha, limit = values.get("swiglu_alpha", 1.702), values.get("swiglu_limit", 7.0)
        options |= dict(activation=SwiGLU(limit, alpha=alpha, offset=1.0), use_bias=True)
        router |= dict(use_bias=True)
    elif values.get("hidden_act", "silu") not in ("silu", "swish"):  # Two names of one function.
        raise ValueError(f'hidden_act must be "silu", got {values["hidden_act"]!r}.')
    if architecture.selects:
        if values.get("scoring_func", "sigmoid") != "sigmoid":
            raise ValueError(f'scoring_func must be "sigmoid", got {values["scoring_func"]!r}.')
        router |= dict(
            score="sigmoid",
            scale=_value(values, "routed_scaling_factor"),
            groups=values.get("n_group"),
            top_groups=values.get("topk_group"),
            use_selection_bias=True,
        )
        options |= dict(shared_features=sizes.shared or None)
    return options | dict(router=Router(_value(values, "num_experts_per_tok"), **router))


def from_huggingface(state: Mapping[str, Any], config: Any, *, prefix: str = "") -> dict[str, Any]:
    """Converts the weights of one block to the variables of `jg.linen.MoEMlp`.

    It takes the names of published checkpoints, with arrays for each expert, and those of modules of `transformers` 5,
    which stack the experts. Kernels in FP8 with a `weight_scale_inv` for each block of 128x128 (DeepSeek-V3) and in
    MXFP4 with `_blocks` and `_scales` (gpt-oss) become float32, and so does a selection bias. Every other array keeps
    its type, or gets the one that NumPy gives the experts' arrays together.

    Args:
        state: arrays by name: NumPy's, PyTorch's tensors, or others that `np.asarray` takes. Names that do not begin
            with `prefix` are ignored. Of a checkpoint in several files, the union of those that have the block.
        config: as in `huggingface_options`.
        prefix: what comes before the names of the block, with its dot.

    Returns:
        `{"params": {...}}` of NumPy arrays and, with a selection bias, `{"router_state": {"selection_bias": ...}}`.
        `jg.nnx.load_variables` loads them into `jg.nnx.MoEMlp`.

    Raises:
        KeyError: an array is missing, or the configuration lacks a value.
        TypeError: `state` or `config` is no mapping.
        ValueError: an array has another shape than the configuration says, numbers of 8 bits without their scales, or
            no place in the layer; or as in `huggingface_options`.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        state = {
            "mlp.gate.weight": jnp.ones((2, 8)),
            "mlp.experts.gate_up_proj": jnp.ones((2, 2 * 4, 8)),
            "mlp.experts.down_proj": jnp.ones((2, 8, 4)),
        }

        variables = jg.moe.from_huggingface(state, config, prefix="mlp.")

        assert variables["params"]["gate_up"]["kernel"].shape == (2, 8, 2, 4)
    """
    values, architecture, (experts, features, hidden, shared) = _known(config)
    block = _Block(state, prefix, values["model_type"])
    router = {"kernel": block.take(f"{architecture.router}.weight", experts, features).T}
    if architecture.interleaved:
        router["bias"] = block.take(f"{architecture.router}.bias", experts)
        interleaved = {
            "kernel": block.take_transposed("experts.gate_up_proj", experts, features, 2 * hidden),
            "bias": block.take("experts.gate_up_proj_bias", experts, 2 * hidden),
        }
        gate_up = {
            name: np.swapaxes(array.reshape(*array.shape[:-1], hidden, 2), -1, -2)
            for name, array in interleaved.items()
        }
        down = {
            "kernel": block.take_transposed("experts.down_proj", experts, hidden, features),
            "bias": block.take("experts.down_proj_bias", experts, features),
        }
    elif "experts.gate_up_proj" in block:
        stacked = block.take("experts.gate_up_proj", experts, 2 * hidden, features)
        gate_up = {"kernel": np.transpose(stacked.reshape(experts, 2, hidden, features), (0, 3, 1, 2))}
        down = {"kernel": np.swapaxes(block.take("experts.down_proj", experts, features, hidden), 1, 2)}
    else:
        kernels = [block.take_expert(f"experts.{i}.", architecture, hidden, features) for i in range(experts)]
        gate_up, down = ({"kernel": np.stack(stack)} for stack in zip(*kernels, strict=True))
    variables: dict[str, Any] = {"params": {"router": router, "gate_up": gate_up, "down": down}}
    if architecture.selects:
        bias = block.take(f"{architecture.router}.e_score_correction_bias", experts)
        # In bfloat16 an update of 0.001 would be lost.
        variables["router_state"] = {"selection_bias": bias.astype(np.float32)}
    if shared:
        shared_gate_up, shared_down = block.take_expert("shared_experts.", architecture, shared, features)
        variables["params"] |= {
            "shared_gate_up": {"kernel": shared_gate_up[None]},
            "shared_down": {"kernel": shared_down[None]},
        }
    block.check_all_taken()
    return variables


def to_huggingface(
    variables: Mapping[str, Any], config: Any, *, prefix: str = "", per_expert: bool = False
) -> dict[str, np.ndarray]:
    """Converts variables of `jg.linen.MoEMlp` to the weights of a published model's block: `from_huggingface` undone.

    The conversion is linear, so gradients can be converted, too.

    Args:
        variables: as `from_huggingface` returns them. Without `router_state`, there is no selection bias in the result.
        config: as in `huggingface_options`.
        prefix: what comes before the names of the block, with its dot.
        per_expert: whether each expert has arrays of its own, as in published checkpoints. Otherwise the names are
            those of modules of `transformers` 5. gpt-oss has no arrays for each expert.

    Returns:
        Arrays by name, in the types of the variables.

    Raises:
        KeyError: a variable is missing, or the configuration lacks a value.
        ValueError: a variable has another shape than the configuration says; or as in `huggingface_options`.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        kernels = dict(router=jnp.ones((8, 2)), gate_up=jnp.ones((2, 8, 2, 4)), down=jnp.ones((2, 4, 8)))
        params = {name: {"kernel": kernel} for name, kernel in kernels.items()}

        state = jg.moe.to_huggingface({"params": params}, config, per_expert=True)

        assert state["experts.1.down_proj.weight"].shape == (8, 4)
    """
    _, architecture, (experts, features, hidden, shared) = _known(config)
    if "params" not in variables:
        raise KeyError(f"The variables have no params, but {', '.join(map(str, variables)) or 'nothing'}.")
    params = variables["params"]
    gate_up = _checked(params, "gate_up", "kernel", (experts, features, 2, hidden))
    down = _checked(params, "down", "kernel", (experts, hidden, features))
    state = {f"{architecture.router}.weight": _checked(params, "router", "kernel", (features, experts)).T}
    if architecture.interleaved:
        bias = _checked(params, "gate_up", "bias", (experts, 2, hidden))
        state |= {
            f"{architecture.router}.bias": _checked(params, "router", "bias", (experts,)),
            "experts.gate_up_proj": np.swapaxes(gate_up, 2, 3).reshape(experts, features, 2 * hidden),
            "experts.gate_up_proj_bias": np.swapaxes(bias, 1, 2).reshape(experts, 2 * hidden),
            "experts.down_proj": down,
            "experts.down_proj_bias": _checked(params, "down", "bias", (experts, features)),
        }
    elif per_expert:
        for expert in range(experts):
            state |= _name_expert(f"experts.{expert}.", architecture, gate_up[expert], down[expert])
    else:
        stacked = np.transpose(gate_up, (0, 2, 3, 1)).reshape(experts, 2 * hidden, features)
        state |= {"experts.gate_up_proj": stacked, "experts.down_proj": np.swapaxes(down, 1, 2)}
    if architecture.selects and (router_state := variables.get("router_state")):
        bias = _checked({"router_state": router_state}, "router_state", "selection_bias", (experts,))
        state[f"{architecture.router}.e_score_correction_bias"] = bias
    if shared:
        shared_gate_up = _checked(params, "shared_gate_up", "kernel", (1, features, 2, shared))
        shared_down = _checked(params, "shared_down", "kernel", (1, shared, features))
        state |= _name_expert("shared_experts.", architecture, shared_gate_up[0], shared_down[0])
    return {prefix + name: np.ascontiguousarray(array) for name, array in state.items()}


class _Sizes(NamedTuple):
    experts: int
    features: int
    hidden: int
    shared: int


def _known(config: Any) -> tuple[Mapping[str, Any], _Architecture, _Sizes]:
    """Returns the values of a configuration, and the names and sizes of the block of its model."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        found = type(config).__name__
        raise TypeError(f"config must be a mapping, or a configuration of transformers, got {found}.")
    values = config if isinstance(config, Mapping) else config.to_dict()
    model = _value(values, "model_type")
    if model not in _ARCHITECTURES:
        raise ValueError(f"model_type must be one of {[*_ARCHITECTURES]}, got {model!r}.")
    architecture = _ARCHITECTURES[model]
    hidden = _value(values, architecture.hidden)
    experts = _value(values, "num_local_experts", "num_experts", "n_routed_experts")
    shared = hidden * (values.get("n_shared_experts") or 0) if architecture.selects else 0
    return values, architecture, _Sizes(experts, _value(values, "hidden_size"), hidden, shared)


def _value(values: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise KeyError(f"The configuration has no {' or '.join(names)}.")


def _checked(variables: Mapping[str, Any], part: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a variable as a NumPy array of this shape."""
    if name not in variables.get(part, {}):
        raise KeyError(f"The variables have no {part}/{name}.")
    value = variables[part][name]
    array = np.asarray(value.unbox() if hasattr(value, "unbox") else value)
    if array.shape != shape:
        raise ValueError(f"{part}/{name} must have shape {shape}, got {array.shape}.")
    return array


def _name_expert(
    name: str, architecture: _Architecture, gate_up: np.ndarray, down: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the arrays of one expert, from `[K, 2, F]` and `[F, K]`."""
    arrays = gate_up[:, 0].T, gate_up[:, 1].T, down.T
    names = (f"{name}{projection}.weight" for projection in architecture.projections)
    return dict(zip(names, arrays, strict=True))


class _Block:
    """The arrays of one block, each of which is taken once."""

    def __init__(self, state: Mapping[str, Any], prefix: str, model: str):
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}.")
        self._state, self._prefix, self._model = state, prefix, model
        self._left = {name for name in state if name.startswith(prefix)}
        if not self._left:
            raise KeyError(f"The state has no names that begin with {prefix!r}; it has {_some(state)}.")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._left

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Returns an array of this shape. Dequantizes one that has scales of blocks."""
        array = self._take_of_shape(name, *shape)
        if f"{name}_scale_inv" not in self:
            if array.dtype.itemsize == 1 or array.dtype.kind in "biu":
                raise ValueError(f"{self._prefix}{name} is {array.dtype}, and the state has no {name}_scale_inv.")
            return array
        scales = self._take_any(f"{name}_scale_inv")
        expected = (*shape[:-2], *(-(-size // 128) for size in shape[-2:]))
        if scales.shape != expected:
            raise ValueError(f"{self._prefix}{name}_scale_inv must have shape {expected}, got {scales.shape}.")
        element_scales = np.repeat(np.repeat(scales, 128, axis=-2), 128, axis=-1)[..., : shape[-2], : shape[-1]]
        return array.astype(np.float32) * element_scales.astype(np.float32)

    def take_transposed(self, name: str, experts: int, inputs: int, outputs: int) -> np.ndarray:
        """Returns kernels `[E, in, out]`, which are there as they are, or in MXFP4 as `[E, out, in / 32, 16]` bytes."""
        if f"{name}_blocks" not in self:
            return self.take(name, experts, inputs, outputs)
        if inputs % 32:
            raise ValueError(f"{self._prefix}{name}_blocks have 32 numbers each, of which {inputs} is no multiple.")
        blocks = self._take_of_shape(f"{name}_blocks", experts, outputs, inputs // 32, 16)
        scales = self._take_of_shape(f"{name}_scales", experts, outputs, inputs // 32)
        pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1)
        numbers = np.ldexp(pairs.reshape(*blocks.shape[:3], 32), scales.astype(np.int32)[..., None] - 127)
        return np.swapaxes(numbers.reshape(experts, outputs, inputs), 1, 2)

    def take_expert(
        self, prefix: str, architecture: _Architecture, hidden: int, features: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns an expert's kernels, `[K, 2, F]` and `[F, K]`."""
        gate, up, down = architecture.projections
        halves = [self.take(f"{prefix}{name}.weight", hidden, features).T for name in (gate, up)]
        return np.stack(halves, axis=1), self.take(f"{prefix}{down}.weight", features, hidden).T

    def check_all_taken(self) -> None:
        if self._left:
            raise ValueError(f"A block of {self._model} has no place for {_some(self._left)}.")

    def _take_of_shape(self, name: str, *shape: int) -> np.ndarray:
        """Returns an array of this shape, of any type."""
        array = self._take_any(name)
        if array.shape != shape:
            raise ValueError(f"{self._prefix}{name} must have shape {shape}, got {array.shape}.")
        return array

    def _take_any(self, name: str) -> np.ndarray:
        key = self._prefix + name
        if key not in self._left:
            raise KeyError(f"The state has no {key}, which a block of {self._model} needs.")
        self._left.remove(key)
        array = self._state[key]
        return _from_torch(array) if hasattr(array, "detach") else np.asarray(array)


def _some(names: Collection[str]) -> str:
    """Lists names, of many the first few."""
    few, count = sorted(names)[:8], len(names)
    return f"{few}" + (f" and {count - len(few)} more" if count > len(few) else "")


def _from_torch(tensor: Any) -> np.ndarray:
    """Converts a tensor of PyTorch, whose narrow types NumPy knows from `ml_dtypes` only."""
    tensor, name = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        array: np.ndarray = tensor.numpy()
        return array
    words = tensor.contiguous().view(getattr(sys.modules["torch"], "uint8" if tensor.itemsize == 1 else "int16"))
    return np.asarray(words.numpy()).view(getattr(ml_dtypes, name))
