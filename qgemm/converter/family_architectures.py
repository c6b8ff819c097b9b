"""Records of architectures by family: those of one family differ from each other, or from llama, in a few entries."""

from __future__ import annotations

from gguf import MODEL_ARCH

from . import config_rules, family_keys
from .architecture_record import (
    ATTENTION,
    BEFORE_FFN,
    BIASES,
    DENSE,
    ENDS,
    EXPERTS,
    FUSED_ATTENTION,
    HEAD_NORMS,
    POST_NORMS,
    ROW_NORMS,
    SHARED_EXPERT,
    UP_DOWN,
    Architecture,
    Shapes,
    with_biases,
)  # fmt: skip
from .fused_weights import (
    either_experts,
    granite_experts,
    groups_of_heads,
    heads_of_three,
    joined_experts,
    latent_attention,
    transposed_experts,
    transposed_products,
)  # fmt: skip
from .hyperparameters import common_keys, llama3_factors, llama_keys

LAYER: Shapes = {**ATTENTION, **BEFORE_FFN}
NORM_BIASES: Shapes = {"attn_norm.bias": "E", "ffn_norm.bias": "E"}
AFTER_NORMS: Shapes = {
    **{name: shape for name, shape in ATTENTION.items() if name != "attn_norm.weight"}, **POST_NORMS
}  # fmt: skip
FUSED_GATES: Shapes = {"ffn_up.weight": "2F E", "ffn_down.weight": "E F"}
PARALLEL: Shapes = {name: shape for name, shape in LAYER.items() if name != "ffn_norm.weight"}
NORMED_ENDS: Shapes = {**ENDS, "output_norm.bias": "E"}
LEARNED_POSITIONS: Shapes = {**NORMED_ENDS, "position_embd.weight": "P E"}
SHARED: Shapes = {**EXPERTS, **SHARED_EXPERT}
CORRECTED: Shapes = {**SHARED, "exp_probs_b.bias": "X"}
LATENT: Shapes = {
    "attn_norm.weight": "E", "attn_kv_a_mqa.weight": "KR+R E", "attn_kv_a_norm.weight": "KR",
    "attn_k_b.weight": "H KR N", "attn_v_b.weight": "H U KR", "attn_output.weight": "E HU", "ffn_norm.weight": "E",
}  # fmt: skip
WHOLE_QUERY: Shapes = {"attn_q.weight": "HQ E"}
LATENT_QUERY: Shapes = {"attn_q_a.weight": "QR E", "attn_q_a_norm.weight": "QR", "attn_q_b.weight": "HQ QR"}
OF_GPT2: Shapes = with_biases({**FUSED_ATTENTION, **BEFORE_FFN, **UP_DOWN})

PARTIAL = ("partial_rotary_factor",)
ROUTED = {"n_routed_experts": "num_experts"}
GPT2_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
TIED = {"tie_word_embeddings": True}

GLM_ROLES = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"}

GLM4 = Architecture(
    MODEL_ARCH.GLM4, family_keys.partial_rotary_keys, {**LAYER, **POST_NORMS, **FUSED_GATES}, config_rules.GLM,
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128}, read_rotary=PARTIAL,
    roles={**GLM_ROLES, "bos": "<|endoftext|>"},
)  # fmt: skip
GRANITE_MOE = Architecture(
    MODEL_ARCH.GRANITE_MOE, family_keys.granite_moe_keys, LAYER, config_rules.GRANITE_MOE, rotary_pairs=True,
    split=granite_experts, aliases={"shared_intermediate_size": "shared_expert_intermediate_size"},
    defaults={"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
              "logits_scaling": 1.0},
)  # fmt: skip
DEEPSEEK = Architecture(
    MODEL_ARCH.DEEPSEEK2, family_keys.deepseek2_keys, LATENT, config_rules.DEEPSEEK2,
    by_layer=lambda config, layer: LATENT_QUERY if config.integer("q_lora_rank") else WHOLE_QUERY,
    split=latent_attention, experts=SHARED, aliases=ROUTED, derived=family_keys.shared_expert,
    read_rotary=("mscale", "mscale_all_dim"), defaults={"n_shared_experts": 2},
)  # fmt: skip

DEEPSEEK3 = DEEPSEEK._replace(
    keys=family_keys.deepseek3_keys, rules=config_rules.DEEPSEEK3, experts=CORRECTED,
    defaults={
        "norm_topk_prob": True, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    },
)  # fmt: skip
GLM4_MOE_LITE: config_rules.Rules = {
    **config_rules.DEEPSEEK3, "n_group": config_rules.decided_elsewhere(1),
    "topk_group": config_rules.DEEPSEEK3["topk_group"]._replace(default=1),
    "qk_head_dim": config_rules.decided_elsewhere(256), "mlp_layer_types": config_rules.decided_elsewhere(None),
    "num_key_value_heads": config_rules.same_as("num_attention_heads", 20),
    "q_lora_rank": config_rules.DEEPSEEK3["q_lora_rank"]._replace(default=768),
}  # fmt: skip
MINIMAX: config_rules.Rules = {  # the last four are keys of the model's own code
    "hidden_act": config_rules.SILU, "tie_word_embeddings": config_rules.OFF,
    "scoring_func": config_rules.only("sigmoid"), "use_qk_norm": config_rules.only(True),
    "qk_norm_type": config_rules.only("per_layer"), "use_routing_bias": config_rules.only(True),
}  # fmt: skip
GLM_TOKENS = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}

QWEN_VL = Architecture(
    MODEL_ARCH.QWEN2VL, family_keys.qwen_vl_keys, {**LAYER, **BIASES}, config_rules.QWEN_VL,
    read_rotary=("mrope_section",), defaults={"mrope_section": [16, 24, 24]},
)  # fmt: skip
QWEN3_VL = Architecture(
    MODEL_ARCH.QWEN3VL, family_keys.qwen3vl_keys, {**LAYER, **HEAD_NORMS}, config_rules.QWEN3_VL,
    read_rotary=("mrope_section",), defaults={"mrope_section": [24, 20, 20]},
)  # fmt: skip
MINISTRAL3 = Architecture(
    MODEL_ARCH.MISTRAL3, family_keys.ministral_keys, LAYER, config_rules.MINISTRAL3, rotary_pairs=True,
    read_rotary=("mscale", "mscale_all_dim"),
)  # fmt: skip
LLAMA4 = Architecture(
    MODEL_ARCH.LLAMA4, family_keys.llama4_keys, LAYER, config_rules.LLAMA4, split=transposed_experts, experts=SHARED,
    factors={"llama3": llama3_factors}, derived=family_keys.llama4_sizes, defaults={"rope_theta": 5e5},
    tied_by_text=True,
)  # fmt: skip

FAMILIES = {
    "Qwen2MoeForCausalLM": Architecture(
        MODEL_ARCH.QWEN2MOE, family_keys.qwen2moe_keys, {**LAYER, **BIASES}, config_rules.QWEN2MOE,
        split=joined_experts, experts={**SHARED, "ffn_gate_inp_shexp.weight": "E"},
    ),
    "ArceeForCausalLM": Architecture(
        MODEL_ARCH.ARCEE, llama_keys, {**LAYER, **UP_DOWN}, config_rules.ARCEE, rotary_pairs=True,
        factors={"llama3": llama3_factors},
    ),
    "InternLM3ForCausalLM": Architecture(
        MODEL_ARCH.LLAMA, llama_keys, LAYER, config_rules.INTERNLM3, rotary_pairs=True,
        derived=family_keys.without_dynamic_scaling,
    ),
    "MiniCPMForCausalLM": Architecture(
        MODEL_ARCH.MINICPM, family_keys.minicpm_keys, LAYER, config_rules.MINICPM, rotary_pairs=True,
        defaults={"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, **TIED},
    ),
    "SmolLM3ForCausalLM": Architecture(
        MODEL_ARCH.SMOLLM3, llama_keys, LAYER, config_rules.SMOLLM3, rotary_pairs=True,
        factors={"llama3": llama3_factors}, defaults={"rope_theta": 2e6, **TIED},
    ),
    "OlmoForCausalLM": Architecture(
        MODEL_ARCH.OLMO, family_keys.olmo_keys,
        {name: shape for name, shape in ATTENTION.items() if name != "attn_norm.weight"}, config_rules.OLMO,
        rotary_pairs=True, ends={"token_embd.weight": "V E"},
    ),
    "Olmo3ForCausalLM": Architecture(
        MODEL_ARCH.OLMO2, family_keys.windows_keys, {**AFTER_NORMS, **ROW_NORMS}, config_rules.OLMO3,
        defaults={"rope_theta": 5e5, "sliding_window": 4096},
    ),
    "CohereForCausalLM": Architecture(
        MODEL_ARCH.COMMAND_R, family_keys.cohere_keys, {**PARALLEL, **DENSE}, config_rules.COHERE,
        defaults={"rope_theta": 5e5, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, **TIED},
    ),
    "Cohere2ForCausalLM": Architecture(
        MODEL_ARCH.COHERE2, family_keys.cohere2_keys, {**PARALLEL, **DENSE}, config_rules.COHERE2,
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, **TIED},
    ),
    "GlmForCausalLM": GLM4._replace(
        kind=MODEL_ARCH.CHATGLM, keys=family_keys.glm_keys, layer={**LAYER, **FUSED_GATES}, roles=GLM_ROLES
    ),
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": Architecture(
        MODEL_ARCH.GLM4_MOE, family_keys.glm4moe_keys, {**ATTENTION, "post_attention_norm.weight": "E"},
        config_rules.GLM4MOE, split=joined_experts, experts=CORRECTED,
        by_layer=lambda config, layer: HEAD_NORMS if config.value("use_qk_norm") is True else {},
        aliases=ROUTED, derived=family_keys.shared_expert, read_rotary=PARTIAL,
        defaults={
            "partial_rotary_factor": 0.5, "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
        roles=GLM_TOKENS,
    ),
    "Starcoder2ForCausalLM": Architecture(
        MODEL_ARCH.STARCODER2, family_keys.layer_norm_keys, with_biases({**LAYER, **UP_DOWN}),
        config_rules.STARCODER2, ends=NORMED_ENDS, aliases={"norm_epsilon": "layer_norm_eps"}, defaults=TIED,
    ),
    "NemotronForCausalLM": Architecture(
        MODEL_ARCH.NEMOTRON, family_keys.nemotron_keys, {**LAYER, **UP_DOWN, **NORM_BIASES}, config_rules.NEMOTRON,
        norms_plus_one=True, ends=NORMED_ENDS, aliases={"norm_eps": "layer_norm_eps"},
        defaults={"partial_rotary_factor": 0.5}, read_rotary=PARTIAL,
    ),
    "StableLmForCausalLM": Architecture(
        MODEL_ARCH.STABLELM, family_keys.parallel_keys, {**PARALLEL, **DENSE, "attn_norm.bias": "E"},
        config_rules.STABLELM, ends=NORMED_ENDS,
        by_layer=lambda config, layer: {} if config.value("use_parallel_residual") is True else with_biases(BEFORE_FFN),
        defaults={"partial_rotary_factor": 0.25}, read_rotary=PARTIAL,
        aliases={"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"},
    ),
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE._replace(experts=SHARED),
    "Exaone4ForCausalLM": Architecture(
        MODEL_ARCH.EXAONE4, family_keys.exaone4_keys, {**AFTER_NORMS, **HEAD_NORMS}, config_rules.EXAONE4,
        factors={"llama3": llama3_factors},
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        MODEL_ARCH.HUNYUAN_DENSE, common_keys, {**LAYER, **HEAD_NORMS}, config_rules.HUNYUAN,
        derived=family_keys.dense_hunyuan,
    ),
    "Ernie4_5ForCausalLM": Architecture(
        MODEL_ARCH.ERNIE4_5, common_keys, LAYER, config_rules.ERNIE,
        defaults={"rope_theta": 5e5, "head_dim": 128, **TIED},
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        MODEL_ARCH.ERNIE4_5_MOE, family_keys.ernie_moe_keys, LAYER, config_rules.ERNIE_MOE, split=joined_experts,
        experts=CORRECTED, aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        derived=family_keys.shared_expert,
        defaults={"rope_theta": 5e5, "moe_layer_interval": 1, "moe_layer_start_index": 1,
                  "moe_num_shared_experts": 2, **TIED},
    ),
    "Dots1ForCausalLM": Architecture(
        MODEL_ARCH.DOTS1, family_keys.dots1_keys, {**LAYER, **HEAD_NORMS}, config_rules.DOTS1, split=joined_experts,
        experts=CORRECTED, aliases=ROUTED, derived=family_keys.shared_expert,
    ),
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK3,
    "Glm4MoeLiteForCausalLM": DEEPSEEK3._replace(
        rules=GLM4_MOE_LITE, derived=family_keys.glm_lite_sizes, roles=GLM_TOKENS,
        defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        MODEL_ARCH.MINIMAXM2, family_keys.minimax_keys, {**LAYER, **ROW_NORMS}, MINIMAX, split=joined_experts,
        experts={**EXPERTS, "exp_probs_b.bias": "X"}, derived=family_keys.rotated_share, read_rotary=PARTIAL,
        defaults={"rope_theta": 5e6, "head_dim": 128},
    ),
    "PhiForCausalLM": Architecture(
        MODEL_ARCH.PHI2, family_keys.phi_keys, {**with_biases({**PARALLEL, **UP_DOWN})}, config_rules.PHI,
        ends={**NORMED_ENDS, "output.weight": "V E", "output.bias": "V"}, defaults={"partial_rotary_factor": 0.5},
        read_rotary=PARTIAL,
    ),
    "GPTNeoXForCausalLM": Architecture(
        MODEL_ARCH.GPTNEOX, family_keys.parallel_keys, OF_GPT2, config_rules.GPTNEOX, ends=NORMED_ENDS,
        split=heads_of_three, aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        defaults={"partial_rotary_factor": 0.25, "use_parallel_residual": True}, read_rotary=PARTIAL,
    ),
    "GPT2LMHeadModel": Architecture(
        MODEL_ARCH.GPT2, family_keys.layer_norm_keys, OF_GPT2, config_rules.GPT2, ends=LEARNED_POSITIONS,
        split=transposed_products, aliases=GPT2_NAMES, derived=family_keys.four_times, defaults=TIED,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        MODEL_ARCH.STARCODER, family_keys.layer_norm_keys, OF_GPT2, config_rules.GPTBIGCODE, ends=LEARNED_POSITIONS,
        aliases=GPT2_NAMES, derived=family_keys.one_key_head, defaults=TIED,
    ),
    "FalconForCausalLM": Architecture(
        MODEL_ARCH.FALCON, family_keys.falcon_keys, {**FUSED_ATTENTION, **UP_DOWN, "attn_norm.bias": "E"},
        config_rules.FALCON, ends=NORMED_ENDS, split=groups_of_heads,
        optional={"attn_norm_2.weight": "E", "attn_norm_2.bias": "E"},
        aliases={**GPT2_NAMES, "n_head_kv": "num_kv_heads"},
        derived=family_keys.falcon_sizes, defaults={"max_position_embeddings": 2048, **TIED},
    ),
    "BloomForCausalLM": Architecture(
        MODEL_ARCH.BLOOM, family_keys.layer_norm_keys, OF_GPT2, config_rules.BLOOM, split=heads_of_three,
        ends={**NORMED_ENDS, "token_embd_norm.weight": "E", "token_embd_norm.bias": "E"},
        aliases={**GPT2_NAMES, "n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
        derived=family_keys.four_times, defaults={"max_position_embeddings": 2048, **TIED},
    ),
    "ApertusForCausalLM": Architecture(
        MODEL_ARCH.APERTUS, llama_keys, {**LAYER, **HEAD_NORMS, **UP_DOWN}, config_rules.APERTUS,
        factors={"llama3": llama3_factors},
        numbers={f".act_fn.{name}": f"add_xielu_{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        MODEL_ARCH.HUNYUAN_MOE, family_keys.hunyuan_moe_keys, {**LAYER, **HEAD_NORMS}, config_rules.HUNYUAN,
        split=joined_experts, experts=SHARED, derived=family_keys.hunyuan_sizes,
    ),
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL._replace(
        kind=MODEL_ARCH.QWEN3VLMOE, keys=family_keys.qwen3vlmoe_keys, rules=config_rules.QWEN3_VL_MOE,
        split=either_experts,
    ),
    "Mistral3ForConditionalGeneration": MINISTRAL3._replace(rules=config_rules.MISTRAL3),
    "Ministral3ForCausalLM": MINISTRAL3,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
}  # fmt: skip
