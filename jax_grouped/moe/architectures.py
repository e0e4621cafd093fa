"""Published mixture-of-experts models: how their blocks name arrays and keys, and how their routers compute."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax_grouped.kernels.routing import GroupScore, Score
from jax_grouped.moe.routing import BiasOn, WeightsOn


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The names of the arrays of one kind of block, and the keys of its configuration."""

    router: str = "gate"
    #: Name of the bias for the choice of experts, None if there is none, and its axes.
    selection_bias: str | None = None
    selection_bias_axes: Literal["E", "1E"] = "E"
    #: Name of the expert that all tokens share, and of its gate; None if there is none.
    shared: str | None = None
    shared_gate: str | None = None
    #: Those of an expert's gate, up and down, where each expert has arrays of its own.
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    #: How all experts' kernels are stacked: `[E, 2 F, K]` and `[E, K, F]`; transposed; transposed with gate and up in
    #: turns, and with biases; or without a gate.
    stacked: Literal["halves", "transposed", "interleaved", "up"] = "halves"
    #: Whether checkpoints have these kernels transposed, under the same names.
    published_transposed: bool = False
    #: Whether PEFT takes the inputs and outputs of these kernels for each other: transposed, without a mark.
    peft_swaps: bool = False
    #: Whether checkpoints have an array for each expert.
    per_expert: bool = True
    #: Whether the module of the shared expert has one array for gate and up.
    shared_joined: bool = False
    #: Other names, or beginnings of names, in checkpoints.
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)

    #: Keys of `F`, and of the features of the shared expert, or of one of several that are joined.
    hidden: str = "moe_intermediate_size"
    shared_hidden: str = ""
    #: Whether the configuration has the number of shared experts.
    counts_shared: bool = False
    #: The score, unless the configuration has a `scoring_func`.
    score: Score = "softmax"
    #: Whether weights are divided by their sum, or the key that says it.
    normalize: bool | str = "norm_topk_prob"
    #: Key of the factor of the weights.
    scale: str | None = None
    #: Number by which groups of experts are chosen; None if there are none.
    group_score: GroupScore | None = None
    bias_on: BiasOn = "scores"
    weights_on: WeightsOn = "output"
    #: Whether the activation is clamped, with a `swiglu_limit`.
    clamps: bool = False
    #: Values of the model's code for keys that a configuration may lack.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_replace = dataclasses.replace
_MIXTRAL = Architecture(projections=("w1", "w3", "w2"), hidden="intermediate_size", normalize=True)
_OLMOE = Architecture(hidden="intermediate_size")
_QWEN2 = Architecture(
    shared="shared_expert", shared_gate="shared_expert_gate", shared_hidden="shared_expert_intermediate_size"
)
_DEEPSEEK_V3 = Architecture(
    selection_bias="gate.e_score_correction_bias",
    shared="shared_experts",
    shared_hidden="moe_intermediate_size",
    counts_shared=True,
    score="sigmoid",
    scale="routed_scaling_factor",
    group_score="top2_sum",
    defaults=dict(norm_topk_prob=True, routed_scaling_factor=1.0),
)
_DEEPSEEK_V2 = _replace(
    _DEEPSEEK_V3,
    selection_bias=None,
    score="softmax",
    normalize=False,
    group_score="max",
    defaults=dict(routed_scaling_factor=1.0),
)
_GRANITE = Architecture(
    router="router",
    per_expert=False,
    published={
        "router.weight": "router.layer.weight",
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
    },
    hidden="intermediate_size",
    normalize=True,
)
#: By `model_type`. A configuration of a model of several modalities has that of its text model inside.
ARCHITECTURES = {
    "afmoe": _replace(
        _DEEPSEEK_V3,
        router="router.gate",
        selection_bias="expert_bias",
        normalize=True,
        scale="route_scale",
        group_score=None,
        defaults=dict(route_scale=1.0),
    ),
    "aria_text": _replace(
        _GRANITE,
        stacked="transposed",
        published={"experts.gate_up_proj": "experts.fc1.weight", "experts.down_proj": "experts.fc2.weight"},
        shared="shared_experts",
        shared_hidden="intermediate_size",
        counts_shared=True,
    ),
    "axk2": _DEEPSEEK_V3,
    "bailing_hybrid": _DEEPSEEK_V3,
    "deepseek_ocr2_text": _DEEPSEEK_V2,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    # Its layers of hash routing have no bias: they take the experts of a table.
    "deepseek_v4": _replace(
        _DEEPSEEK_V3,
        counts_shared=False,
        score="sqrtsoftplus",
        normalize=True,
        group_score=None,
        clamps=True,
        projections=("w1", "w3", "w2"),
        published={
            "gate.e_score_correction_bias": "gate.bias",
            "shared_experts.gate_proj": "shared_experts.w1",
            "shared_experts.up_proj": "shared_experts.w3",
            "shared_experts.down_proj": "shared_experts.w2",
        },
        defaults=dict(swiglu_limit=10.0),
    ),
    "dots1": _replace(_DEEPSEEK_V3, defaults=dict(norm_topk_prob=False, routed_scaling_factor=1.0)),
    "dots3_note_text": _replace(_DEEPSEEK_V3, shared_hidden="shared_experts_intermediate_size"),
    "ernie4_5_moe": Architecture(
        selection_bias="gate.moe_statics.e_score_correction_bias",
        selection_bias_axes="1E",
        published={"gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction_bias"},
        shared="shared_experts",
        shared_hidden="moe_intermediate_size",
        counts_shared=True,
        normalize=True,
    ),
    "exaone_moe": _replace(
        _DEEPSEEK_V3,
        published={"gate.e_score_correction_bias": "e_score_correction_bias"},
    ),
    "flex_olmo": _OLMOE,
    "flint": _replace(_QWEN2, shared_gate=None, score="sigmoid", defaults=dict(norm_topk_prob=True)),
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm4v_moe_text": _DEEPSEEK_V3,
    "glm5_next_text": _replace(_DEEPSEEK_V3, clamps=True, defaults={**_DEEPSEEK_V3.defaults, "swiglu_limit": 10.0}),
    "glm_moe_dsa": _DEEPSEEK_V3,
    "gpt_oss": Architecture(
        "router",
        hidden="intermediate_size",
        stacked="interleaved",
        per_expert=False,
        normalize=True,
        clamps=True,
        defaults=dict(swiglu_alpha=1.702, swiglu_limit=7.0),
    ),
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": Architecture(
        router="gate.wg",
        shared="shared_mlp",
        shared_hidden="intermediate_size",
        hidden="intermediate_size",
        normalize=True,
    ),
    "hy_v3": _replace(
        _DEEPSEEK_V3,
        selection_bias="e_score_correction_bias",
        published={
            "gate.weight": "router.gate.weight",
            "e_score_correction_bias": "expert_bias",
            "shared_experts": "shared_mlp",
        },
        normalize=True,
        scale="router_scaling_factor",
        group_score=None,
        defaults=dict(router_scaling_factor=2.826),
    ),
    "jamba": Architecture(router="router", hidden="intermediate_size", normalize=False),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": _DEEPSEEK_V3,
    "kolibri1": _replace(
        _DEEPSEEK_V3,
        shared_hidden="shared_expert_intermediate_size",
        counts_shared=False,
        scale=None,
        bias_on="logits",
        group_score=None,
        defaults=dict(norm_topk_prob=False),
    ),
    "laguna": _replace(
        _DEEPSEEK_V3,
        published={
            "gate.e_score_correction_bias": "experts.e_score_correction_bias",
            "shared_experts": "shared_expert",
        },
        shared_hidden="shared_expert_intermediate_size",
        counts_shared=False,
        normalize=True,
        scale="moe_routed_scaling_factor",
        group_score=None,
        defaults=dict(moe_routed_scaling_factor=1.0),
    ),
    "lara_mini": _replace(_QWEN2, shared_gate=None, defaults=dict(norm_topk_prob=True)),
    "lfm2_moe": _replace(
        _DEEPSEEK_V3,
        selection_bias="expert_bias",
        shared=None,
        projections=("w1", "w3", "w2"),
        group_score=None,
    ),
    "llama4_text": Architecture(
        peft_swaps=True,
        router="router",
        shared="shared_expert",
        shared_hidden="intermediate_size",
        stacked="transposed",
        per_expert=False,
        hidden="intermediate_size",
        score="sigmoid",
        normalize=False,
        weights_on="input",
    ),
    "mellum": Architecture(defaults=dict(norm_topk_prob=True)),
    "mimo_v2_flash": _replace(_DEEPSEEK_V3, shared=None),
    "minimax": _MIXTRAL,
    "minimax_m2": _replace(_MIXTRAL, selection_bias="e_score_correction_bias", score="sigmoid"),
    "minimax_m3_vl_text": _replace(
        _MIXTRAL,
        selection_bias="gate.e_score_correction_bias",
        published={"gate.e_score_correction_bias": "e_score_correction_bias"},
        shared="shared_experts",
        shared_hidden="shared_intermediate_size",
        shared_joined=True,
        score="sigmoid",
        scale="routed_scaling_factor",
        clamps=True,
        defaults=dict(routed_scaling_factor=2.0, swiglu_alpha=1.702, swiglu_limit=7.0),
    ),
    "mistral4": _replace(_DEEPSEEK_V3, selection_bias=None, score="softmax"),
    "mistral_large4_text": _replace(_DEEPSEEK_V3, selection_bias=None, score="softmax", normalize=True),
    "mixtral": _MIXTRAL,
    "nemotron_h": _replace(
        _DEEPSEEK_V3,
        shared_hidden="moe_shared_expert_intermediate_size",
        counts_shared=False,
        stacked="up",
        projections=("", "up_proj", "down_proj"),
    ),
    "olmoe": _OLMOE,
    "qwen2_moe": _QWEN2,
    "qwen3_5_moe_text": _replace(_QWEN2, normalize=True),
    "qwen3_moe": Architecture(),
    "qwen3_next": _replace(_QWEN2, defaults=dict(norm_topk_prob=True)),
    "qwen3_omni_moe_text": Architecture(),
    "qwen3_omni_moe_talker_text": _QWEN2,
    "qwen3_vl_moe_text": Architecture(normalize=True, per_expert=False, published_transposed=True),
    "qwen4_exp_text": _replace(_QWEN2, defaults=dict(norm_topk_prob=True)),
    "solar_open": _DEEPSEEK_V3,
    "unlimited_ocr_text": _DEEPSEEK_V2,
}
#: Parts of other models that the layer lacks, and ways to have them with it nevertheless.
MISSING = {
    "axk1": "a norm after the experts, around the layer",
    "cohere2_moe": "experts and a shared expert that are averaged",
    "dbrx": "kernels in another order",
    "gemma4_text": "a router with a norm and scales: pass routing",
    "hy_v4": "a shared expert without the experts' clamp: pass shared",
    "inkling": "weights that shared experts have a part of: pass routing and shared",
    "inkling2": "softcaps inside the experts",
    "jetmoe": "experts of attention",
    "longcat_flash": "experts that do nothing: pass routing with other indices, and add their tokens",
    "muse_spark": "products and a norm around the experts, around the layer, and a factor of logits",
    "nllb_moe": "biases of experts without a gate",
    "openai_privacy_filter": "gate and up in halves with biases",
    "phimoe": "sparsemixer",
    "step3p7": "limits of each layer: activation=jg.SwiGLU(limit, clamp_result=True)",
    "switch_transformers": "a capacity of each expert",
    "zaya": "an expert that skips: pass routing",
}
