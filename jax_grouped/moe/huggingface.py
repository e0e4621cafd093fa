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
    options: dict[str, Any] = dict(num_experts=sizes["E"], hidden_features=sizes["F"])
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
        options |= dict(shared_features=sizes["shared"] or None)
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
        They are copies. `jg.nnx.load_variables` loads them into `jg.nnx.MoEMlp`.

    Raises:
        KeyError: an array is missing, or the configuration lacks a value.
        TypeError, ValueError: `state` or `config` is no mapping, or an array has another shape than the configuration
            says, numbers of 8 bits without their scales, or no place in the layer; or as in `huggingface_options`.

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
    values, architecture, sizes = _known(config)
    block = _Block(state, prefix, values["model_type"])
    variables: dict[str, Any] = {}
    for variable in _variables(architecture, sizes, per_expert="experts.gate_up_proj" not in block):
        arrays = {index: block.take(name, *variable.array_shape) for index, name in variable.names.items()}
        *outer, last = variable.path.split("/")
        # In bfloat16 an update of a selection bias by 0.001 would be lost.
        dtype = np.float32 if last == "selection_bias" else np.result_type(*[array.dtype for array in arrays.values()])
        value = np.empty(variable.shape, dtype)
        for index, array in arrays.items():
            part = variable.part(value, index)
            part[...] = array.reshape(part.shape)
        collection = variables
        for key in outer:
            collection = collection.setdefault(key, {})
        collection[last] = value
        del arrays, array, part  # Dequantized arrays are as large as the variable.
    block.check_all_taken()
    return variables


def to_huggingface(
    variables: Mapping[str, Any], config: Any, *, prefix: str = "", per_expert: bool = False
) -> dict[str, np.ndarray]:
    """Converts variables of `jg.linen.MoEMlp` to the weights of a published model's block: `from_huggingface` undone.

    The conversion is linear, so gradients can be converted, too.

    Args:
        variables: as `from_huggingface` returns them. Without `router_state`, the result has no selection bias.
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
    _, architecture, sizes = _known(config)
    if "params" not in variables:
        raise KeyError(f"The variables have no params, but {', '.join(map(str, variables)) or 'nothing'}.")
    state = {}
    for variable in _variables(architecture, sizes, per_expert=per_expert):
        if variable.path.startswith("router_state") and not variables.get("router_state"):
            continue
        value: Any = variables
        for key in variable.path.split("/"):
            if key not in value:
                raise KeyError(f"The variables have no {variable.path}.")
            value = value[key]
        value = np.asarray(value.unbox() if hasattr(value, "unbox") else value)
        if value.shape != variable.shape:
            raise ValueError(f"{variable.path} must have shape {variable.shape}, got {value.shape}.")
        for index, name in variable.names.items():
            array = variable.part(value, index).reshape(variable.array_shape)
            state[prefix + name] = np.ascontiguousarray(array)
    return state


def _known(config: Any) -> tuple[Mapping[str, Any], _Architecture, dict[str, int]]:
    """Returns the values of a configuration, and the names and sizes of the block of its model."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(f"config must be a mapping, or a configuration of transformers, got {type(config).__name__}.")
    values = config if isinstance(config, Mapping) else config.to_dict()
    model = _value(values, "model_type")
    if model not in _ARCHITECTURES:
        raise ValueError(f"model_type must be one of {[*_ARCHITECTURES]}, got {model!r}.")
    architecture = _ARCHITECTURES[model]
    hidden = _value(values, architecture.hidden)
    experts = _value(values, "num_local_experts", "num_experts", "n_routed_experts")
    shared = hidden * (values.get("n_shared_experts") or 0) if architecture.selects else 0
    sizes = {"E": experts, "K": _value(values, "hidden_size"), "2": 2, "F": hidden, "shared": shared}
    return values, architecture, sizes


def _value(values: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise KeyError(f"The configuration has no {' or '.join(names)}.")


class _Variable(NamedTuple):
    """A variable of `MoEMlp`, and the arrays of a block that hold it. A letter, or 2 for gate and up, is an axis."""

    path: str
    axes: str
    #: Names of the arrays, by indices along the axes that they lack.
    names: Mapping[Any, str]
    array_axes: str
    sizes: dict[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([self.sizes[axis] for axis in self.axes])

    @property
    def array_shape(self) -> tuple[int, ...]:
        joined = self.sizes | {"G": 2 * self.sizes["F"]}  # Gate and up share an axis of the arrays.
        return tuple([joined[axis] for axis in self.array_axes.replace("2F", "G").replace("F2", "G")])

    def part(self, variable: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
        """Returns a view of what one array holds, with the axes of the array."""
        lacking = [axis for axis in self.axes if axis not in self.array_axes]
        return variable.transpose([self.axes.index(axis) for axis in (*lacking, *self.array_axes)])[index]


def _variables(architecture: _Architecture, sizes: dict[str, int], *, per_expert: bool) -> list[_Variable]:
    """Returns all variables of a block; `per_expert` matters for an architecture that knows both forms of experts."""
    router, (*halves, last) = architecture.router, architecture.projections
    whole = [("params/router/kernel", "KE", f"{router}.weight", "EK")]
    separate: dict[str, tuple[list[str], dict[str, int]]] = {}
    if architecture.interleaved:
        whole += [
            ("params/router/bias", "E", f"{router}.bias", "E"),
            ("params/gate_up/kernel", "EK2F", "experts.gate_up_proj", "EKF2"),
            ("params/gate_up/bias", "E2F", "experts.gate_up_proj_bias", "EF2"),
            ("params/down/kernel", "EFK", "experts.down_proj", "EFK"),
            ("params/down/bias", "EK", "experts.down_proj_bias", "EK"),
        ]
    elif per_expert:
        separate[""] = [f"experts.{expert}." for expert in range(sizes["E"])], sizes
    else:
        whole += [
            ("params/gate_up/kernel", "EK2F", "experts.gate_up_proj", "E2FK"),
            ("params/down/kernel", "EFK", "experts.down_proj", "EKF"),
        ]
    if architecture.selects:
        whole.append(("router_state/selection_bias", "E", f"{router}.e_score_correction_bias", "E"))
    if sizes["shared"]:
        separate["shared_"] = ["shared_experts."], sizes | {"E": 1, "F": sizes["shared"]}
    variables = [_Variable(path, axes, {(): name}, array_axes, sizes) for path, axes, name, array_axes in whole]
    for part, (experts, own_sizes) in separate.items():
        gate_up = {(i, j): f"{name}{half}.weight" for i, name in enumerate(experts) for j, half in enumerate(halves)}
        down = {(i,): f"{name}{last}.weight" for i, name in enumerate(experts)}
        variables += [
            _Variable(f"params/{part}gate_up/kernel", "EK2F", gate_up, "FK", own_sizes),
            _Variable(f"params/{part}down/kernel", "EFK", down, "KF", own_sizes),
        ]
    return variables


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
        if len(shape) == 3 and f"{name}_blocks" in self:
            # In MXFP4, kernels `[E, in, out]` are `[E, out, in / 32, 16]` bytes of two numbers each.
            experts, inputs, outputs = shape
            if inputs % 32:
                raise ValueError(f"{self._prefix}{name}_blocks have 32 numbers each, of which {inputs} is no multiple.")
            blocks = self._take_stored(f"{name}_blocks", experts, outputs, inputs // 32, 16)
            scales = self._take_stored(f"{name}_scales", experts, outputs, inputs // 32)
            pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1)
            numbers = np.ldexp(pairs.reshape(*blocks.shape[:3], 32), scales.astype(np.int32)[..., None] - 127)
            return np.swapaxes(numbers.reshape(experts, outputs, inputs), 1, 2)
        array = self._take_stored(name, *shape)
        if f"{name}_scale_inv" not in self:
            if array.dtype.itemsize == 1 or array.dtype.kind in "biu":
                raise ValueError(f"{self._prefix}{name} is {array.dtype}, and the state has no {name}_scale_inv.")
            return array
        scales = self._take_stored(f"{name}_scale_inv", *shape[:-2], *[-(-size // 128) for size in shape[-2:]])
        element_scales = np.repeat(np.repeat(scales, 128, axis=-2), 128, axis=-1)[..., : shape[-2], : shape[-1]]
        return array.astype(np.float32) * element_scales.astype(np.float32)

    def check_all_taken(self) -> None:
        if self._left:
            raise ValueError(f"A block of {self._model} has no place for {_some(self._left)}.")

    def _take_stored(self, name: str, *shape: int) -> np.ndarray:
        """Returns an array of this shape as it is stored, of any type."""
        key = self._prefix + name
        if key not in self._left:
            raise KeyError(f"The state has no {key}, which a block of {self._model} needs.")
        self._left.remove(key)
        stored = self._state[key]
        array = _from_torch(stored) if hasattr(stored, "detach") else np.asarray(stored)
        if array.shape != shape:
            raise ValueError(f"{key} must have shape {shape}, got {array.shape}.")
        return array


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
