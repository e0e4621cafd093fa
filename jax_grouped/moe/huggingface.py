"""Weights of published mixture-of-experts models, between the names of Hugging Face and those of `MoEMlp`.

This is NumPy alone: neither `torch` nor `transformers` is needed. A state is a mapping of names to arrays, as
`safetensors.numpy.load_file` returns it, or of tensors, as `safetensors.torch.load_file` does, which knows FP8 too. The
block's names come after a prefix such as `"model.layers.0.mlp."`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, get_args

import ml_dtypes
import numpy as np

from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.layout import BLOCK
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels.activations import SwiGLU
from jax_grouped.kernels.routing import Score
from jax_grouped.moe.architectures import ARCHITECTURES, MISSING, Architecture
from jax_grouped.moe.routing import Router
from jax_grouped.ops.inputs import flat_shape

#: Numbers of FP4 (e2m1) by their four bits.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

#: Activations of configurations, with and without a gate.
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "relu": "reglu"}
_WITHOUT_GATE = {"relu2": "relu_squared", "silu": "silu", "relu": "relu"}


def huggingface_options(config: Any) -> dict[str, Any]:
    """Returns the arguments with which `MoEMlp` is the block of a published model.

    Args:
        config: the model's `config.json` as a mapping, or a configuration of `transformers`, of a model in the table of
            the page "Your model". That of the text model may be inside. Values that models' code knows may be missing.

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
    options: dict[str, Any] = dict(num_experts=sizes["E"], hidden_features=sizes["F"])
    act = values.get("mlp_hidden_act") or values.get("hidden_act") or values.get("hidden_activation") or "silu"
    names = _WITHOUT_GATE if architecture.stacked == "up" else _GATED
    if act not in names:
        raise ValueError(f"hidden_act must be one of {[*names]}, got {act!r}.")
    options["activation"] = names[act]
    if architecture.clamps:
        alpha = values.get("swiglu_alpha")
        number = dict(alpha=1.0, offset=0.0) if alpha is None else dict(alpha=alpha, offset=1.0)
        options["activation"] = SwiGLU(values.get("swiglu_limit"), **number)
    if architecture.shared is not None:
        options["shared_features"] = sizes["shared"] or None
        options["use_shared_gate"] = architecture.shared_gate is not None and sizes["shared"] > 0
    if values.get("moe_latent_size") is not None:
        raise ValueError(
            f"moe_latent_size must be None, got {values['moe_latent_size']}: project the tokens around the layer."
        )
    normalize, scale = architecture.normalize, architecture.scale
    score = values.get("scoring_func") or architecture.score
    if score not in get_args(Score):
        raise ValueError(f"scoring_func must be one of {get_args(Score)}, got {score!r}.")
    router: dict[str, Any] = dict(
        score=score,
        normalize=_value(values, normalize) if isinstance(normalize, str) else normalize,
        scale=1.0 if scale is None else _value(values, scale),
        softcap=values.get("moe_router_logit_softcapping") or None,
        bias_on=architecture.bias_on,
        weights_on=architecture.weights_on,
        use_selection_bias=_selects(values, architecture),
    )
    groups = values.get("n_group") or values.get("num_expert_group")
    is_greedy = architecture.group_score == "max" and values.get("topk_method") != "group_limited_greedy"
    if architecture.group_score is not None and groups is not None and not is_greedy:
        router |= dict(groups=groups, top_groups=_value(values, "topk_group"), group_score=architecture.group_score)
    if architecture.stacked == "interleaved":
        options["use_bias"] = router["use_bias"] = True
    top_k = _value(values, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    return options | dict(router=Router(top_k, **router))


def from_huggingface(state: Mapping[str, Any], config: Any, *, prefix: str = "") -> dict[str, Any]:
    """Converts the weights of one block to the variables of `jg.linen.MoEMlp`.

    It takes the names of published checkpoints, with arrays for each expert, and those of modules of `transformers` 5,
    which stack the experts. Kernels in FP8 with a `weight_scale_inv` for each block of 128x128 (DeepSeek-V3), or a
    `weight_scale` for each row or the whole (compressed-tensors), and in MXFP4 with `_blocks` and `_scales` (gpt-oss)
    become float32, and so does a selection bias. Every other array keeps its type, or gets the one that NumPy gives the
    experts' arrays together.

    Args:
        state: arrays by name: NumPy's, PyTorch's tensors, or others that `np.asarray` takes. Names that do not begin
            with `prefix` are ignored. Of a checkpoint in several files, the union of those that have the block.
        config: the model's configuration, of a `model_type` that `huggingface_options` knows.
        prefix: what comes before the names of the block, with its dot.

    Returns:
        `{"params": {...}}` of NumPy arrays and, with a selection bias, `{"router_state": {"selection_bias": ...}}`.
        They are copies. `jg.nnx.load_variables` loads them into `jg.nnx.MoEMlp`.

    Raises:
        KeyError: an array is missing, or the configuration lacks a value.
        TypeError, ValueError: `state` or `config` is no mapping, or an array has another shape than the configuration
            says, numbers of 8 bits without their scales, or no place in the layer; or the model is not supported.

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
    if f"{architecture.projections[2]}.weight" in block and f"{architecture.router}.weight" not in block:
        raise ValueError(f"{prefix} is a dense feed-forward network, as some layers of {values['model_type']} are.")
    is_stacked = f"experts.{'up_proj' if architecture.stacked == 'up' else 'gate_up_proj'}" in block
    if architecture.published_transposed:
        experts, features, hidden = sizes["E"], sizes["K"], sizes["F"]
        # Compare both kernels: one of them may be square.
        transposed = {"gate_up_proj": (experts, features, 2 * hidden), "down_proj": (experts, hidden, features)}
        if all(np.shape(state.get(f"{prefix}experts.{name}", ())) == shape for name, shape in transposed.items()):
            architecture = dataclasses.replace(architecture, stacked="transposed")
    variables: dict[str, Any] = {}
    for variable in _variables(values, architecture, sizes, per_expert=not is_stacked):
        arrays = {}
        for index, name in variable.names.items():
            published = _published(architecture, name)
            found = name if name in block or f"{name}_blocks" in block else published
            arrays[index] = block.take(found, *variable.array_shape)
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
    variables: Mapping[str, Any], config: Any, *, prefix: str = "", per_expert: bool = False, mxfp4: bool = False
) -> dict[str, np.ndarray]:
    """Converts variables of `jg.linen.MoEMlp` to the weights of a published model's block: `from_huggingface` undone.

    The conversion is linear but for `mxfp4`, so gradients can be converted, too.

    Args:
        variables: as `from_huggingface` returns them. Without `router_state`, the result has no selection bias. Kernels
            that are in a `kernel_cache` alone, as `jg.linen.quantize_for_inference` leaves them, are written as they
            are there, if they have scales of blocks of 128x128: float8_e4m3fn, with a `weight_scale_inv`.
        config: the model's configuration, of a `model_type` that `huggingface_options` knows.
        prefix: what comes before the names of the block, with its dot.
        per_expert: whether each expert has arrays of its own, as in published checkpoints. Otherwise the names are
            those of modules of `transformers` 5. Some models, such as gpt-oss, have no arrays for each expert.
        mxfp4: whether kernels become FP4 (e2m1), rounded to the nearest even, with a power of two for each 32 inputs:
            `_blocks` and `_scales` of gpt-oss. Numbers that were read from such a file come back as they were.

    Returns:
        Arrays by name, in the types of the variables, or the numbers of a cache and their float32 scales.

    Raises:
        KeyError: a variable is missing, or the configuration lacks a value.
        ValueError: a variable has another shape than the configuration says, a cache has other scales, or the model has
            no kernels in MXFP4; or the model is not supported.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        kernels = dict(router=jnp.ones((8, 2)), gate_up=jnp.ones((2, 8, 2, 4)), down=jnp.ones((2, 4, 8)))
        params = {name: {"kernel": kernel} for name, kernel in kernels.items()}

        state = jg.moe.to_huggingface({"params": params}, config, per_expert=True)

        assert state["experts.1.down_proj.weight"].shape == (8, 4)
    """
    return dict(stream_huggingface(variables, config, prefix=prefix, per_expert=per_expert, mxfp4=mxfp4))


def stream_huggingface(
    variables: Mapping[str, Any], config: Any, *, prefix: str = "", per_expert: bool = False, mxfp4: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of `to_huggingface` one by one. With `per_expert`, one expert at a time leaves the device.

    Args:
        variables: of `jg.linen.MoEMlp`, as `to_huggingface` takes them.
        config: the model's configuration, of a `model_type` that `huggingface_options` knows.
        prefix: what comes before the names of the block, with its dot.
        per_expert: whether each expert has arrays of its own, as in published checkpoints.
        mxfp4: whether kernels become FP4, with a power of two for each 32 inputs.

    Returns:
        Names and arrays, for files of a size that the host's memory has room for.

    Raises:
        KeyError, TypeError, ValueError: those of `to_huggingface`, once the array is asked for.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        kernels = dict(router=jnp.ones((8, 2)), gate_up=jnp.ones((2, 8, 2, 4)), down=jnp.ones((2, 4, 8)))
        params = {name: {"kernel": kernel} for name, kernel in kernels.items()}

        names = [name for name, _ in jg.moe.stream_huggingface({"params": params}, config, per_expert=True)]

        assert len(names) == 1 + 2 * 3
    """
    values, architecture, sizes = _known(config)
    if "params" not in variables:
        raise KeyError(f"The variables have no params, but {', '.join(map(str, variables)) or 'nothing'}.")
    if per_expert and architecture.published_transposed:
        architecture = dataclasses.replace(architecture, stacked="transposed")
    for variable in _variables(values, architecture, sizes, per_expert=per_expert):
        if variable.path.startswith("router_state") and not variables.get("router_state"):
            continue
        value, cache = _found(variables, variable.path), None
        if value is None:
            cache = _found(variables, variable.path.replace("params", "kernel_cache", 1))
            if not isinstance(cache, KernelCache):
                raise KeyError(f"The variables have no {variable.path}.")
        expected, shape = variable.shape, np.shape(value)
        if cache is not None:
            expected, shape = flat_shape(variable.shape), cache.columnwise.shape
        if shape != expected:
            raise ValueError(f"{variable.path} must have shape {expected}, got {shape}.")
        one_by_one = variable.axes[0] == "E" != variable.array_axes[0] and len(variable.names) > 1
        last, whole, scale = None, np.empty(0), None
        for index, name in variable.names.items():
            experts = slice(index[0], index[0] + 1) if one_by_one else slice(None)
            if experts != last:
                last = experts
                if cache is None:
                    whole = np.asarray(value[experts])
                else:
                    whole, scale = _numbers_and_scales(cache, variable, experts)
            own_index = (0, *index[1:]) if one_by_one else index
            key = prefix + (_published(architecture, name) if per_expert else name)
            array = np.ascontiguousarray(variable.part(whole, own_index).reshape(variable.array_shape))
            if mxfp4 and variable.is_kernel:
                if architecture.stacked not in ("transposed", "interleaved") or cache is not None:
                    raise ValueError(f"{key} cannot be in MXFP4, as kernels of gpt-oss and its like can.")
                yield from _in_mxfp4(key, array)
                continue
            yield key, array
            if scale is not None:
                part = variable.part(scale, own_index)
                blocks = [-(-size // BLOCK) for size in variable.array_shape[-2:]]
                yield f"{key}_scale_inv", np.ascontiguousarray(part.reshape(*variable.array_shape[:-2], *blocks))


def _in_mxfp4(name: str, kernel: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a kernel `[E, in, out]` in MXFP4 (OCP Microscaling Formats, version 1.0)."""
    experts, inputs, outputs = kernel.shape
    if inputs % 32:
        raise ValueError(f"{name} has blocks of 32 inputs in MXFP4, of which {inputs} is no multiple.")
    numbers = np.swapaxes(kernel, 1, 2).astype(np.float32).reshape(experts, outputs, -1, 32)
    largest = np.abs(numbers).max(axis=-1)
    if not np.isfinite(largest).all():
        raise ValueError(f"{name} must be finite.")
    # The largest number of FP4 is 6 = 1.5 * 2^2, and `frexp` returns mantissas below 1.
    exponent = np.where(largest > 0, np.clip(np.frexp(largest)[1] - 3, -127, 127), 0)
    scaled = np.clip(np.ldexp(numbers, -exponent[..., None]), -6, 6)
    bits = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    yield f"{name}_blocks", bits[..., 0::2] | bits[..., 1::2] << 4
    yield f"{name}_scales", (exponent + 127).astype(np.uint8)


def to_peft(
    variables: Mapping[str, Any], config: Any, *, prefix: str = "", per_expert: bool = False
) -> dict[str, np.ndarray]:
    """Converts the adapters of a `MoEMlp` with `lora` to the arrays of PEFT's `adapter_model.safetensors`.

    Args:
        variables: of the layer, of which the collection `lora` is read.
        config: the model's configuration, of a `model_type` that `huggingface_options` knows.
        prefix: what comes before the names of the block, such as `"base_model.model.model.layers.0.mlp."`.
        per_expert: whether every linear layer of every expert has an adapter, as PEFT's `target_modules` make them and
            vLLM loads them; gate and up have copies of one `lora_A`. Otherwise the arrays are those of
            `target_parameters`, with `experts.gate_up_proj` inside of `experts.down_proj`.

    Returns:
        Arrays by name, in the types of the variables. In `adapter_config.json`, `r` is the rank of the `LoraConfig`,
        and `lora_alpha` that times its scale.

    Raises:
        KeyError: a variable is missing, or the configuration lacks a value.
        ValueError: a variable has another shape than the configuration says; or the model is not supported.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        gate_up = dict(lora_a=jnp.ones((2, 8, 3)), lora_b=jnp.ones((2, 3, 2, 4)))
        down = dict(lora_a=jnp.ones((2, 4, 3)), lora_b=jnp.ones((2, 3, 8)))

        state = jg.moe.to_peft({"lora": {"gate_up": gate_up, "down": down}}, config)

        assert state["experts.base_layer.lora_A.weight"].shape == (2 * 3, 8)
        assert jnp.array_equal(jg.moe.from_peft(state, config)["lora"]["down"]["lora_a"], down["lora_a"])
    """
    values, architecture, sizes = _known(config)
    state = {}
    for kernel in _variables(values, architecture, sizes, per_expert=per_expert):
        if not kernel.is_kernel:
            continue
        factors: list[Any] = [_found(variables, f"lora/{kernel.layer}/{factor}") for factor in ("lora_a", "lora_b")]
        if factors[0] is None or factors[1] is None:
            raise KeyError(f"The variables have no lora/{kernel.layer}.")
        arrays = [np.asarray(factor) for factor in factors]
        own_factors = kernel.factors(arrays[0].shape[-1], swapped=architecture.peft_swaps)
        for own, array in zip(own_factors, arrays, strict=True):
            if array.shape != own.shape:
                raise ValueError(f"{own.path} must have shape {own.shape}, got {array.shape}.")
            for index, name in own.names.items():
                key = prefix + (_published(architecture, name) if per_expert else name)
                state[key] = np.ascontiguousarray(own.matrix(own.part(array, index)))
    return state


def from_peft(state: Mapping[str, Any], config: Any, *, prefix: str = "") -> dict[str, Any]:
    """Converts the adapters that PEFT has on one block's experts, in either form of `to_peft`.

    Where gate and up of an expert have adapters of their own, all adapters get twice the rank: that of the joined
    kernel has one half for each, and others zeros. An expert or a projection without an adapter has zeros, too.
    Training leaves factors as they are where both are zero.

    Args:
        state: arrays of `adapter_model.safetensors` by name. Names that do not begin with `prefix` are ignored.
        config: the model's configuration, of a `model_type` that `huggingface_options` knows.
        prefix: what comes before the names of the block, such as `"base_model.model.model.layers.0.mlp."`.

    Returns:
        `{"lora": {...}}` of NumPy arrays, for a layer with a `LoraConfig` of their rank, and of the scale
        `lora_alpha / r` of `adapter_config.json`. `jg.nnx.load_variables` loads them into `jg.nnx.MoEMlp`.

    Raises:
        KeyError: the state has nothing of the block, or one array of two, or the configuration lacks a value.
        TypeError, ValueError: `state` or `config` is no mapping, or an array has another shape than it says.

    Example:
        config = dict(model_type="olmoe", hidden_size=8, intermediate_size=4, num_experts=2)
        state = {
            "experts.0.down_proj.lora_A.weight": jnp.ones((3, 4)),
            "experts.0.down_proj.lora_B.weight": jnp.ones((8, 3)),
        }

        down = jg.moe.from_peft(state, config)["lora"]["down"]

        assert down["lora_a"].shape == (2, 4, 3) and down["lora_b"][:, 0, 0].tolist() == [1, 0]
    """
    values, architecture, sizes = _known(config)
    block = _Block(state, prefix, values["model_type"])
    is_stacked = "experts.lora_A.weight" in block or "experts.base_layer.lora_A.weight" in block
    kernels = [each for each in _variables(values, architecture, sizes, per_expert=not is_stacked) if each.is_kernel]

    def key(name: str) -> str:
        return name if name in block else _published(architecture, name)

    rank = 1
    for kernel in kernels:
        for name in kernel.factors(1, swapped=False)[0].names.values():
            if key(name) in block:
                rank = np.shape(state[prefix + key(name)])[0] // (sizes["E"] if "E" in kernel.array_axes else 1)
    lora: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for kernel in kernels:
        # One factor of each half of the features: gate and up may have different ones.
        a, b = kernel.factors(rank, swapped=architecture.peft_swaps)
        halves = sorted({index[1:] for index in kernel.names})
        factors = {half: (np.zeros(a.shape, np.float32), np.zeros(b.shape, np.float32)) for half in halves}
        for index in kernel.names:
            if key(a.names[index]) not in block and key(b.names[index]) not in block:
                continue
            for own, array in zip((a, b), factors[index[1:]], strict=True):
                part = own.part(array, index)
                part[...] = block.take(key(own.names[index]), *own.matrix(part).shape).reshape(part.shape)
        (whole, total), *others = factors.values()
        for other, more in others:
            total = total + more if np.array_equal(whole, other) else np.concatenate([total, more], axis=1)
            whole = whole if np.array_equal(whole, other) else np.concatenate([whole, other], axis=2)
        lora[kernel.layer] = whole, total
    block.check_all_taken()
    most = max(a.shape[2] for a, _ in lora.values())

    def padded(array: np.ndarray, axis: int) -> np.ndarray:
        return np.pad(array, [(0, most - size if i == axis else 0) for i, size in enumerate(array.shape)])

    return {"lora": {name: dict(lora_a=padded(a, 2), lora_b=padded(b, 1)) for name, (a, b) in lora.items()}}


def _found(variables: Mapping[str, Any], path: str) -> Any:
    """Returns the variable of this path, out of Flax's boxes, or None."""
    value: Any = variables
    for key in path.split("/"):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value.unbox() if hasattr(value, "unbox") else value


def _numbers_and_scales(cache: KernelCache, variable: _Variable, own: slice) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a cache has of some experts, and a scale for each block of 128x128, both in the variable's axes.

    Raises ValueError unless arrays of the block have whole blocks.
    """
    stored = cache.columnwise
    if stored.layout.mode != ScalingMode.BLOCK_2D or stored.data.dtype != ml_dtypes.float8_e4m3fn:
        raise ValueError(
            f"{variable.path} must be quantized to float8_e4m3fn in blocks of 128x128 to be written in FP8."
        )
    data, scale = np.asarray(stored.data[own]), np.asarray(stored.layout.read_scales(stored.scale_inv)[own])
    experts, outputs, _ = data.shape
    scale = scale.swapaxes(1, 2)  # As the data, `[E, N / 128, K / 128]`.
    halves = (2,) if "2" in variable.axes else ()
    if variable.array_axes.endswith("F2"):
        raise ValueError(f"{variable.path} cannot be written in FP8, because rows of gate and up alternate in a block.")
    if halves and outputs // 2 % BLOCK:
        raise ValueError(
            f"F must be a multiple of 128 to write gate and up of {variable.path} in FP8, got {outputs // 2}."
        )

    def in_axes(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(experts, *halves, -1, x.shape[2]), -1, 1)

    return in_axes(data), in_axes(scale)


def _known(config: Any) -> tuple[Mapping[str, Any], Architecture, dict[str, int]]:
    """Returns the values of a configuration, and the names and sizes of the block of its model."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(f"config must be a mapping, or a configuration of transformers, got {type(config).__name__}.")
    values = config if isinstance(config, Mapping) else config.to_dict()
    while (model := _value(values, "model_type")) not in ARCHITECTURES:
        inner = [values[key] for key in ("text_config", "thinker_config") if isinstance(values.get(key), Mapping)]
        if not inner:
            if model in MISSING:
                raise ValueError(f"The layer does not compute the experts of {model!r}: {MISSING[model]}.")
            raise ValueError(f"model_type must be one of {sorted(ARCHITECTURES)} or a model of these, got {model!r}.")
        (values,) = inner
    architecture = ARCHITECTURES[model]
    values = {**architecture.defaults, **{key: value for key, value in values.items() if value is not None}}
    hidden = _value(values, architecture.hidden)
    experts = _value(values, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    shared = 0
    if architecture.shared is not None:
        shared = _value(values, architecture.shared_hidden, missing=0)
    if architecture.counts_shared:
        shared *= _value(values, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", missing=0)
    sizes = {"E": experts, "K": _value(values, "hidden_size"), "1": 1, "2": 2, "F": hidden, "shared": shared}
    return values, architecture, sizes


def _selects(values: Mapping[str, Any], architecture: Architecture) -> bool:
    """Tells whether the router has a bias for the choice of experts."""
    return architecture.selection_bias is not None and values.get("use_expert_bias", True)


def _published(architecture: Architecture, name: str) -> str:
    """Returns the name of an array in checkpoints."""
    for own, other in architecture.published.items():
        if name.startswith(own):
            return other + name.removeprefix(own)
    return name


def _value(values: Mapping[str, Any], *names: str, missing: Any = None) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    if missing is not None:
        return missing
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

    @property
    def layer(self) -> str:
        """The name of the stack of kernels."""
        return self.path.split("/")[1]

    @property
    def is_kernel(self) -> bool:
        """Tells whether it is a kernel of experts, which may have an adapter."""
        return self.path.endswith(("gate_up/kernel", "down/kernel"))

    def part(self, variable: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
        """Returns a view of what one array holds, with the axes of the array. An index may have more axes."""
        lacking = [axis for axis in self.axes if axis not in self.array_axes]
        there = [axis for axis in self.array_axes if axis in self.axes]
        return variable.transpose([self.axes.index(axis) for axis in (*lacking, *there)])[index[: len(lacking)]]

    def factors(self, rank: int, *, swapped: bool) -> tuple[_Variable, _Variable]:
        """Returns `lora_a` and `lora_b` of a kernel. PEFT has `lora_B` for the first one, if it is `swapped`."""
        inputs = "F" if self.layer.endswith("down") else "K"
        experts = "E" if "E" in self.array_axes else ""
        outputs = self.array_axes.replace("E", "").replace(inputs, "")
        swapped &= experts == "E"
        factors = []
        for factor, axes, features in (
            ("a", f"E{inputs}r", inputs),
            ("b", self.axes.replace(inputs, "r", 1), outputs),
        ):
            letter = "A" if (factor == "a") != swapped else "B"
            names = {}
            for index, name in self.names.items():
                base = name.removesuffix(".weight")
                if experts:
                    base = "experts" if self.layer == "down" else "experts.base_layer"
                names[index] = f"{base}.lora_{letter}.weight"
            array_axes = f"{experts}r{features}" if letter == "A" else f"{features}r{experts}"
            path = f"lora/{self.layer}/lora_{factor}"
            factors.append(_Variable(path, axes, names, array_axes, self.sizes | {"r": rank}))
        return factors[0], factors[1]

    def matrix(self, part: np.ndarray) -> np.ndarray:
        """Returns a part of a factor as PEFT has it, with experts and rank in one axis, and features in the other."""
        is_a = self.array_axes[0] in "Er"
        return part.reshape(math.prod(part.shape[: self.array_axes.index("r") + is_a]), -1)


def _variables(
    values: Mapping[str, Any], architecture: Architecture, sizes: dict[str, int], *, per_expert: bool
) -> list[_Variable]:
    """Returns all variables of a block; `per_expert` matters for an architecture that knows both forms of experts."""
    router, stacked = architecture.router, architecture.stacked
    gate_up = "EKF" if stacked == "up" else "EK2F"
    whole = [("params/router/kernel", "KE", f"{router}.weight", "EK")]
    separate: dict[str, tuple[list[str], tuple[str, str, str], dict[str, int]]] = {}
    if stacked == "interleaved":
        whole += [
            ("params/router/bias", "E", f"{router}.bias", "E"),
            ("params/gate_up/kernel", "EK2F", "experts.gate_up_proj", "EKF2"),
            ("params/gate_up/bias", "E2F", "experts.gate_up_proj_bias", "EF2"),
            ("params/down/kernel", "EFK", "experts.down_proj", "EFK"),
            ("params/down/bias", "EK", "experts.down_proj_bias", "EK"),
        ]
    elif per_expert and architecture.per_expert:
        separate[""] = [f"experts.{expert}." for expert in range(sizes["E"])], architecture.projections, sizes
    elif stacked == "up":
        whole += [("params/gate_up/kernel", "EKF", "experts.up_proj", "EFK")]
        whole += [("params/down/kernel", "EFK", "experts.down_proj", "EKF")]
    else:
        forms = ("EK2F", "EFK") if stacked == "transposed" else ("E2FK", "EKF")
        whole += [("params/gate_up/kernel", "EK2F", "experts.gate_up_proj", forms[0])]
        whole += [("params/down/kernel", "EFK", "experts.down_proj", forms[1])]
    if _selects(values, architecture):
        name, axes = str(architecture.selection_bias), architecture.selection_bias_axes
        whole.append(("router_state/selection_bias", "E", name, axes))
    variables = [_Variable(path, axes, {(): name}, array_axes, sizes) for path, axes, name, array_axes in whole]
    if sizes["shared"]:
        own_sizes = sizes | {"E": 1, "F": sizes["shared"]}
        name = f"{architecture.shared}."
        if architecture.shared_gate is not None:
            gate = {(): f"{architecture.shared_gate}.weight"}
            variables.append(_Variable("params/shared_gate/kernel", "K1", gate, "1K", sizes))
        if architecture.shared_joined and not per_expert:
            both = {(0,): f"{name}gate_up_proj.weight"}
            variables.append(_Variable("params/shared_gate_up/kernel", "EK2F", both, "2FK", own_sizes))
            down = {(0,): f"{name}down_proj.weight"}
            variables.append(_Variable("params/shared_down/kernel", "EFK", down, "KF", own_sizes))
        else:
            separate["shared_"] = [name], ("gate_proj", "up_proj", "down_proj"), own_sizes
    for part, (experts, (*halves, last), own_sizes) in separate.items():
        up: dict[Any, str]
        if stacked == "up":
            up = {(i,): f"{name}{halves[1]}.weight" for i, name in enumerate(experts)}
        else:
            up = {(i, j): f"{name}{half}.weight" for i, name in enumerate(experts) for j, half in enumerate(halves)}
        down = {(i,): f"{name}{last}.weight" for i, name in enumerate(experts)}
        variables += [
            _Variable(f"params/{part}gate_up/kernel", gate_up, up, "FK", own_sizes),
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
        scaled = [f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in self]
        if not scaled:
            if array.dtype.itemsize == 1 or array.dtype.kind in "biu":
                raise ValueError(f"{self._prefix}{name} is {array.dtype}, and the state has no {name}_scale_inv.")
            return array
        # Scales of blocks, of rows, or of the whole array; blocks of gate and up may begin anew with up.
        rows, columns = shape[-2:]
        block_shape = (*shape[:-2], -(-rows // BLOCK), -(-columns // BLOCK))
        half_block_shape = (*shape[:-2], 2 * -(-rows // (2 * BLOCK)), -(-columns // BLOCK))
        scales = self._take_stored(scaled[0], block_shape, half_block_shape, (*shape[:-2], rows, 1), (1,), ())
        if scales.shape in (block_shape, half_block_shape):
            parts = [scales] if scales.shape == block_shape else np.split(scales, 2, axis=-2)
            row_scales = [np.repeat(part, BLOCK, axis=-2)[..., : rows // len(parts), :] for part in parts]
            scales = np.repeat(np.concatenate(row_scales, axis=-2), BLOCK, axis=-1)[..., :columns]
        return array.astype(np.float32) * scales.astype(np.float32)

    def check_all_taken(self) -> None:
        if self._left:
            raise ValueError(f"A block of {self._model} has no place for {_some(self._left)}.")

    def _take_stored(self, name: str, *shape: Any) -> np.ndarray:
        """Returns an array of this shape, or of one of these shapes, as it is stored, of any type."""
        key = self._prefix + name
        if key not in self._left:
            raise KeyError(f"The state has no {key}, which a block of {self._model} needs.")
        self._left.remove(key)
        stored = self._state[key]
        array = _from_torch(stored) if hasattr(stored, "detach") else np.asarray(stored)
        if array.shape != shape and array.shape not in shape:
            expected = shape[0] if shape and isinstance(shape[0], tuple) else shape
            raise ValueError(f"{key} must have shape {expected}, got {array.shape}.")
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
