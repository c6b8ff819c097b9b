"""Model classes of Hugging Face to which files of llama.cpp's architectures return: their modules and their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .config_rules import FULL
from .family_architectures import GPT2_NAMES

Document = dict[str, Any]
Modules = Mapping[str, str]

ENDS: Modules = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION: Modules = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
MLP: Modules = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA: Modules = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **MLP}
HEAD_NORMS: Modules = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
AFTER_NORMS: Modules = {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GEMMA2: Modules = {**ATTENTION, **MLP, **AFTER_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
PHI3: Modules = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GLM4: Modules = {
    **LLAMA, "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
AFTER_ATTENTION: Modules = {**ATTENTION, **MLP, "post_attention_norm": "post_attention_layernorm"}


def experts(block: str, gate: str, up: str, down: str, router: str = "gate") -> Modules:
    """The modules of a mixture in a block, {} is the expert's number."""
    return {
        "ffn_gate_inp": f"{block}.{router}", "ffn_gate_exps": f"{block}.experts.{{}}.{gate}",
        "ffn_up_exps": f"{block}.experts.{{}}.{up}", "ffn_down_exps": f"{block}.experts.{{}}.{down}",
    }  # fmt: skip


def shared(block: str) -> Modules:
    """The modules of the expert that every token uses."""
    return {f"ffn_{part}_shexp": f"{block}.{part}_proj" for part in ("gate", "up", "down")}


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = experts("block_sparse_moe", "w1", "w3", "w2")
ROUTED: Modules = {**EXPERTS, **shared("mlp.shared_experts")}
CORRECTED: Modules = {**ROUTED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GRANITE: Modules = {
    "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear", "ffn_down_exps": "block_sparse_moe.output_linear",
}  # fmt: skip
GPT_OSS: Modules = {
    "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
    **{f"ffn_{part}_exps.{end}": f"mlp.experts.{joined}{rest}"
       for part, joined in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
       for end, rest in (("weight", ""), ("bias", "_bias"))},
}  # fmt: skip
LATENT: Modules = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
}  # fmt: skip
GPT2: Modules = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
NEOX: Modules = {
    "attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
BLOOM: Modules = {
    **NEOX, "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
}  # fmt: skip
TRANSFORMER: Modules = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe",
                        "output_norm": "transformer.ln_f", "output": "lm_head"}  # fmt: skip
WORDS: Modules = {
    **TRANSFORMER, "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
}  # fmt: skip

QKV = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
PROJECTIONS = (*QKV, "attn_output.bias")
LLAMA_BIASES = {("attention_bias", True): PROJECTIONS, ("mlp_bias", True): tuple(f"{name}.bias" for name in MLP)}

NUMBERS = {  # key of config.json -> key of the file after the architecture
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window", "clip_qkv": "attention.clamp_kqv",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "moe_layer_interval": "interleave_moe_layer_step",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logit_scale": "logit_scale", "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank", "v_head_dim": "attention.value_length_mla",
    "qk_head_dim": "attention.key_length_mla", "llama_4_scaling_beta": "attention.temperature_scale",
}  # fmt: skip
MAX_LAYERS = 1 << 16  # as config_keys.py allows
SCALES_BY_SHARE = {"gemma2": 46, "gemma3_text": 62}  # model_type -> layers of the model that scales by another size


def gemma(document: Document) -> None:
    """Add the number by which scores are scaled."""
    share = document.get("hidden_size", 0) // max(document.get("num_attention_heads", 1), 1)
    by_share = document.get("num_hidden_layers") == SCALES_BY_SHARE[document["model_type"]]
    document["query_pre_attn_scalar"] = share if by_share else document.get("head_dim", share)


def no_window(document: Document) -> None:
    """Replace a sliding window of 0, or a missing one, by none."""
    document["sliding_window"] = document.get("sliding_window") or None


def exaone(document: Document) -> None:
    """Add the kinds of layers to a config without a window, from which transformers does not derive them."""
    no_window(document)
    layers = document.get("num_hidden_layers")
    if document["sliding_window"] is None and type(layers) is int and 0 < layers <= MAX_LAYERS:
        document["layer_types"] = [FULL] * layers


def latent_attention(document: Document) -> None:
    """Replace the sizes of the shared head of llama.cpp's attention by those of the heads of keys and values."""
    rotated = document.pop("rope.dimension_count", 0)
    document |= {
        "num_key_value_heads": document.get("num_attention_heads"), "head_dim": rotated, "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": document.get("qk_head_dim", 0) - rotated,
        "q_lora_rank": document.get("q_lora_rank"),
    }  # fmt: skip
    scaling = document.get("rope_scaling", {})
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * scaling["mscale_all_dim"], 6)


def ministral(document: Document) -> None:
    """Move the factor of queries at late positions into the settings of rotary embeddings; both mscales are equal."""
    no_window(document)
    scaling, factor = document.get("rope_scaling", {}), document.pop("llama_4_scaling_beta", None)
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = scaling["mscale_all_dim"]
    if factor is not None:
        document["rope_scaling"] = {**scaling, "llama_4_scaling_beta": factor}


def llama4(document: Document) -> None:
    """Add whether heads are normed, which llama.cpp tells by the number of experts."""
    document["use_qk_norm"] = document.get("num_experts") != 128


def falcon(document: Document) -> None:
    """Add whether one head of keys and values serves all queries."""
    document["multi_query"] = document.get("num_key_value_heads") == 1


def exact_yarn(document: Document) -> None:
    """Add that limits of gpt-oss's YaRN are not rounded."""
    if "rope_scaling" in document:
        document["rope_scaling"]["truncate"] = False


class Inverse(NamedTuple):
    """A model class of Hugging Face: its name, its model_type, and its modules by the names of a file's tensors.

    modules: stem of a layer's tensor -> module, {} in it is an expert's number; stems of one module are its parts.
    NAME.weight or NAME.bias -> the whole name. layers, ends: the modules of layers, and of tensors outside.
    marker: the end of a key or the stem of a tensor whose presence selects the class among those of one architecture.
    optional: (key of the config, value) -> tensors that all layers have if and only if the key has the value.
    names: key of NUMBERS -> key of the class, "" for none. values: keys that every config has.
    finish: changes of the config. transposed: stems of the folder's matrices that are stored as [K, N].
    transposed_parts: stems of the file's matrices that hold the folder's rows as columns.
    one_row: tensors that are stored as matrices of one row.
    """

    name: str
    model_type: str
    modules: Modules
    optional: Mapping[tuple[str, bool], tuple[str, ...]] = {}
    ends: Modules = ENDS
    layers: str = "model.layers"
    marker: str = ""
    names: Mapping[str, str] = {}
    values: Mapping[str, Any] = {}
    finish: Callable[[Document], None] = lambda document: None
    transposed: tuple[str, ...] = ()
    transposed_parts: tuple[str, ...] = ()
    one_row: tuple[str, ...] = ()


LOCAL = {"num_experts": "num_local_experts"}
UNSHARED = {"num_experts": "n_routed_experts"}
MULTIPLIERS = {"logit_scale": "logits_scaling"}
POSITIONS = {**{new: old for old, new in GPT2_NAMES.items()}, "rope_theta": "", "num_key_value_heads": ""}
DEEPSEEK = Inverse(
    "DeepseekV2ForCausalLM", "deepseek_v2", {**LLAMA, **LATENT, **ROUTED}, names=UNSHARED, finish=latent_attention,
    transposed_parts=("attn_k_b",),
)  # fmt: skip
GRANITE_MOE = Inverse(
    "GraniteMoeForCausalLM", "granitemoe", {**LLAMA, **GRANITE}, {("attention_bias", True): PROJECTIONS},
    names={**LOCAL, **MULTIPLIERS},
)  # fmt: skip
FALCON = Inverse(
    "FalconForCausalLM", "falcon", BLOOM, ends=WORDS, layers="transformer.h", finish=falcon,
    names={"num_key_value_heads": "num_kv_heads", "layer_norm_eps": "layer_norm_epsilon",
           "intermediate_size": "ffn_hidden_size"},
    values={"new_decoder_architecture": False, "bias": False, "alibi": False, "parallel_attn": True},
)  # fmt: skip

INVERSES: Mapping[str, tuple[Inverse, ...]] = {  # general.architecture -> classes; Mistral's files are llama's
    "llama": (
        Inverse("MixtralForCausalLM", "mixtral", {**LLAMA, **MIXTRAL}, marker="expert_count", names=LOCAL),
        Inverse("LlamaForCausalLM", "llama", LLAMA, LLAMA_BIASES),
    ),
    "llama4": (Inverse(
        "Llama4ForCausalLM", "llama4_text",
        {**LLAMA, "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
         "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
         **shared("feed_forward.shared_expert"), "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj",
         "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj",
         "ffn_down_exps.weight": "feed_forward.experts.down_proj"},
        names={**LOCAL, "intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size",
               "moe_layer_interval": "interleave_moe_layer_step"},
        finish=llama4, transposed=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ),),
    "qwen2": (Inverse("Qwen2ForCausalLM", "qwen2", LLAMA),),
    "qwen2moe": (Inverse(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        {**LLAMA, **EXPERTS, **shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        values={"norm_topk_prob": False}, one_row=("ffn_gate_inp_shexp.weight",),
    ),),
    "qwen3": (Inverse("Qwen3ForCausalLM", "qwen3", {**LLAMA, **HEAD_NORMS}),),
    "qwen3moe": (Inverse(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**LLAMA, **HEAD_NORMS, **EXPERTS}, values={"norm_topk_prob": True},
    ),),
    "gemma": (Inverse("GemmaForCausalLM", "gemma", LLAMA),),
    "gemma2": (Inverse("Gemma2ForCausalLM", "gemma2", GEMMA2, finish=gemma),),
    "gemma3": (Inverse("Gemma3ForCausalLM", "gemma3_text", {**GEMMA2, **HEAD_NORMS}, finish=gemma),),
    "phi2": (Inverse(
        "PhiForCausalLM", "phi", {**LLAMA, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1",
                                  "ffn_down": "mlp.fc2"},
        ends={**ENDS, "output_norm": "model.final_layernorm"},
    ),),
    "phi3": (Inverse("Phi3ForCausalLM", "phi3", PHI3, finish=no_window),),
    "granite": (Inverse("GraniteForCausalLM", "granite", LLAMA, LLAMA_BIASES, names=MULTIPLIERS),),
    "granitemoe": (
        GRANITE_MOE._replace(
            name="GraniteMoeSharedForCausalLM", model_type="granitemoeshared", marker="ffn_gate_shexp",
            names={**LOCAL, **MULTIPLIERS, "shared_expert_intermediate_size": "shared_intermediate_size"},
            modules={**GRANITE_MOE.modules, "ffn_gate_shexp": "shared_mlp.input_linear",
                     "ffn_up_shexp": "shared_mlp.input_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
        ),
        GRANITE_MOE,
    ),
    "olmo": (Inverse("OlmoForCausalLM", "olmo", LLAMA, names={"layer_norm_eps": ""}),),
    "olmo2": (
        Inverse("Olmo3ForCausalLM", "olmo3", {**LLAMA, **HEAD_NORMS, **AFTER_NORMS}, marker="attention.sliding_window"),
        Inverse("Olmo2ForCausalLM", "olmo2", {**LLAMA, **HEAD_NORMS, **AFTER_NORMS}),
    ),
    "olmoe": (Inverse("OlmoeForCausalLM", "olmoe", {**LLAMA, **HEAD_NORMS, **EXPERTS},
                      values={"norm_topk_prob": False}),),
    "seed_oss": (Inverse("SeedOssForCausalLM", "seed_oss", AFTER_ATTENTION),),
    "arcee": (Inverse("ArceeForCausalLM", "arcee", LLAMA),),
    "smollm3": (Inverse("SmolLM3ForCausalLM", "smollm3", LLAMA),),
    "exaone4": (Inverse("Exaone4ForCausalLM", "exaone4", {**LLAMA, **HEAD_NORMS, **AFTER_NORMS}, finish=exaone),),
    "hunyuan-dense": (Inverse(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),),
    "hunyuan-moe": (Inverse(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe",
        {**LLAMA, **experts("mlp", "gate_proj", "up_proj", "down_proj", "gate.wg"), **shared("mlp.shared_mlp"),
         "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        names={"num_experts_per_tok": "moe_topk", "n_shared_experts": "num_shared_expert", "moe_intermediate_size": "",
               "shared_expert_intermediate_size": ""},
    ),),
    "mistral3": (Inverse("Ministral3ForCausalLM", "ministral3", LLAMA, finish=ministral),),
    "ernie4_5": (Inverse("Ernie4_5ForCausalLM", "ernie4_5", LLAMA),),
    "ernie4_5-moe": (Inverse(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
        {**LLAMA, **ROUTED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
               "n_shared_experts": "moe_num_shared_experts", "first_k_dense_replace": "moe_layer_start_index",
               "shared_expert_intermediate_size": ""}, one_row=("exp_probs_b.bias",),
    ),),
    "glm4": (Inverse("Glm4ForCausalLM", "glm4", GLM4, {("attention_bias", True): QKV}),),
    "chatglm": (Inverse("GlmForCausalLM", "glm", GLM4, {("attention_bias", True): QKV}),),
    "glm4moe": (Inverse(
        "Glm4MoeForCausalLM", "glm4_moe", {**AFTER_ATTENTION, **HEAD_NORMS, **CORRECTED},
        {("attention_bias", True): QKV, ("use_qk_norm", True): ("attn_q_norm.weight", "attn_k_norm.weight")},
        names=UNSHARED,
    ),),
    "dots1": (Inverse("Dots1ForCausalLM", "dots1", {**LLAMA, **HEAD_NORMS, **CORRECTED}, names=UNSHARED),),
    "deepseek2": (
        DEEPSEEK._replace(
            name="DeepseekV3ForCausalLM", model_type="deepseek_v3", marker="exp_probs_b",
            modules={**LLAMA, **LATENT, **CORRECTED}, values={"n_group": 1, "topk_group": 1},
        ),
        DEEPSEEK,
    ),
    "gpt-oss": (Inverse(
        "GptOssForCausalLM", "gpt_oss", {**AFTER_ATTENTION, **GPT_OSS}, names={**LOCAL, "moe_intermediate_size": ""},
        finish=exact_yarn, transposed=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ),),
    "command-r": (Inverse("CohereForCausalLM", "cohere", LLAMA),),
    "cohere2": (Inverse("Cohere2ForCausalLM", "cohere2", LLAMA),),
    "starcoder2": (Inverse(
        "Starcoder2ForCausalLM", "starcoder2", {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        names={"layer_norm_eps": "norm_epsilon"},
    ),),
    "nemotron": (
        Inverse("NemotronForCausalLM", "nemotron", LLAMA, LLAMA_BIASES, names={"layer_norm_eps": "norm_eps"}),
    ),
    "stablelm": (Inverse(
        "StableLmForCausalLM", "stablelm", LLAMA,
        {("use_qkv_bias", True): QKV, ("use_parallel_residual", False): ("ffn_norm.weight", "ffn_norm.bias")},
    ),),
    "phimoe": (Inverse(
        "PhimoeForCausalLM", "phimoe", {**LLAMA, **MIXTRAL}, {("attention_bias", True): QKV}, names=LOCAL,
        values={"attention_bias": True, "lm_head_bias": True}, finish=no_window,
    ),),
    "gpt2": (Inverse(
        "GPT2LMHeadModel", "gpt2", GPT2, ends=TRANSFORMER, layers="transformer.h", names=POSITIONS,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),),
    "starcoder": (Inverse(
        "GPTBigCodeForCausalLM", "gpt_bigcode", GPT2, ends=TRANSFORMER, layers="transformer.h", names=POSITIONS,
    ),),
    "gptneox": (Inverse(
        "GPTNeoXForCausalLM", "gpt_neox", NEOX, layers="gpt_neox.layers",
        ends={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base", "num_key_value_heads": ""},
    ),),
    "bloom": (Inverse(
        "BloomForCausalLM", "bloom", BLOOM, ends=WORDS, layers="transformer.h",
        names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "layer_norm_eps": "layer_norm_epsilon",
               "max_position_embeddings": "seq_length", "rope_theta": "", "num_key_value_heads": "",
               "intermediate_size": ""},
    ),),
    "falcon": (
        FALCON._replace(
            marker="attn_norm_2", values={**FALCON.values, "new_decoder_architecture": True},
            modules={**BLOOM, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
            optional={("new_decoder_architecture", True): ("attn_norm_2.weight", "attn_norm_2.bias")},
        ),
        FALCON,
    ),
}  # fmt: skip
