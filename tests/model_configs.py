"""Small configurations of the model classes that tools/model_classes.py makes with transformers."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "num_key_value_heads": 4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                               "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32},
}  # fmt: skip
ENCODER = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
DISTIL = {
    "vocab_size": 64, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
MODERN = {**ENCODER, "num_hidden_layers": 5, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
PATTERN = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
LINEAR = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 32,
}  # fmt: skip

SECTIONS = {  # llama.cpp computes Qwen 2 VL without the epsilon of norms
    "rms_norm_eps": 1e-12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}  # fmt: skip
IMAGE_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}}
QWEN2_VISION = {
    "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1,
}  # fmt: skip
QWEN25_VISION = {
    "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 32,
}  # fmt: skip
QWEN3_VISION = {
    "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
PIXTRAL_VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 16, "patch_size": 4,
}  # fmt: skip
LLAMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
SIGLIP_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
}  # fmt: skip

PHIMOE_ROPE = {
    "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.25, "long_mscale": 1.25,
    "original_max_position_embeddings": 256,  # the least number of tokens for which llama.cpp allocates
}  # fmt: skip
PHIMOE = {
    **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "rope_parameters": {**PHIMOE_ROPE, "rope_type": "longrope", "rope_theta": 1e6},
}  # fmt: skip

# Class -> its configuration where it differs from SIZES, or as a whole where it has other names.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 48},
    "ArceeForCausalLM": SIZES,
    "SmolLM3ForCausalLM": {**SIZES, "num_hidden_layers": 4},
    "OlmoForCausalLM": {**SIZES, "clip_qkv": 8.0},
    "Olmo3ForCausalLM": {**SIZES, "num_hidden_layers": 4, "sliding_window": 16, "layer_types": PATTERN},
    "CohereForCausalLM": SIZES,
    "Cohere2ForCausalLM": {
        **SIZES, "num_hidden_layers": 4, "sliding_window": 16, "layer_types": PATTERN, "head_dim": 16
    },
    "GlmForCausalLM": {**SIZES, "head_dim": 16, "attention_bias": True},
    "Glm4ForCausalLM": {**SIZES, "head_dim": 16},
    "Starcoder2ForCausalLM": SIZES,
    "NemotronForCausalLM": SIZES,
    "StableLmForCausalLM": {**SIZES, "use_qkv_bias": True},
    "GraniteMoeForCausalLM": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeSharedForCausalLM": {
        **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48
    },
    "Exaone4ForCausalLM": {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "HunYuanDenseV1ForCausalLM": {**SIZES, "head_dim": 16},
    "Ernie4_5ForCausalLM": {**SIZES, "head_dim": 16},
    "Ernie4_5_MoeForCausalLM": {
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1,
        "moe_layer_end_index": 1, "moe_num_shared_experts": 2,
    },
    "Dots1ForCausalLM": {
        **SIZES, **ROUTED, "head_dim": 16, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2,
    },
    "Glm4MoeForCausalLM": {**SIZES, **ROUTED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "DeepseekV2ForCausalLM": {  # llama.cpp knows models of 26 and 27 layers without a q_lora_rank
        **SIZES, **ROUTED, **MLA, "num_hidden_layers": 26, "first_k_dense_replace": 25, "q_lora_rank": None,
    },
    "DeepseekV3ForCausalLM": {**SIZES, **ROUTED, **MLA},
    "Glm4MoeLiteForCausalLM": {**SIZES, **ROUTED, **MLA, "rope_scaling": None, "mlp_layer_types": ["dense", "sparse"]},
    "MiniMaxM2ForCausalLM": {
        **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "PhiForCausalLM": {**SIZES, "num_key_value_heads": 4},
    "GPTNeoXForCausalLM": {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"},
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "FalconForCausalLM": {
        **{key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "intermediate_size")},
        "new_decoder_architecture": True, "num_kv_heads": 2,
    },
    "BloomForCausalLM": {
        "vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2
    },
    "ApertusForCausalLM": {
        **SIZES, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "Lfm2ForCausalLM": {
        **SIZES, "intermediate_size": 144, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32,
    },
    "Lfm2MoeForCausalLM": {
        **SIZES, **EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "HunYuanMoEV1ForCausalLM": {**SIZES, "num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "Qwen3NextForCausalLM": {**SIZES, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 48},
    "Qwen3_5ForCausalLM": {**SIZES, **LINEAR},
    "Qwen3_5MoeForCausalLM": {**SIZES, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 48},
    "Ministral3ForCausalLM": {
        **SIZES, "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "Llama4ForCausalLM": {
        **SIZES, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
        "num_local_experts": 4, "interleave_moe_layer_step": 2,
    },
    "SmolVLMForConditionalGeneration": {"text_config": SIZES, "vision_config": SIGLIP_VISION},
    "Idefics3ForConditionalGeneration": {"text_config": SIZES, "vision_config": SIGLIP_VISION},
    "Qwen2AudioForConditionalGeneration": {"text_config": SIZES, "audio_config": WHISPER},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {
            **SIZES, "intermediate_size": 144, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32,
        },
        "vision_config": SIGLIP_VISION,
    },
    "Qwen2VLForConditionalGeneration": {"text_config": {**SIZES, **SECTIONS}, "vision_config": QWEN2_VISION},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": {**SIZES, **SECTIONS}, "vision_config": QWEN25_VISION},
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**SIZES, **IMAGE_SECTIONS, "head_dim": 32}, "vision_config": QWEN3_VISION
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**SIZES, **IMAGE_SECTIONS, **EXPERTS, "moe_intermediate_size": 48, "head_dim": 32},
        "vision_config": QWEN3_VISION,
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": {**SIZES, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "vision_config": PIXTRAL_VISION,
    },
    "Llama4ForConditionalGeneration": {
        "text_config": {
            **SIZES, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
            "num_local_experts": 4,
        },
        "vision_config": LLAMA4_VISION,
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": {**SIZES, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 48},
        "vision_config": QWEN3_VISION,
    },
    "Qwen3_5ForConditionalGeneration": {"text_config": {**SIZES, **LINEAR}, "vision_config": QWEN3_VISION},
    "Gemma4ForCausalLM": {
        **SIZES, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 8, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48,
    },
    "Gemma4ForConditionalGeneration": {"text_config": {
        **SIZES, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    }, "vision_config": None, "audio_config": None},
    "Gemma3nForCausalLM": {
        **SIZES, "num_hidden_layers": 21, "head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 60, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 11,
        "layer_types": ([*["sliding_attention"] * 4, "full_attention"] * 5)[:21],
    },
    "BertModel": ENCODER, "BertForMaskedLM": ENCODER, "XLMRobertaModel": {**ENCODER, "pad_token_id": 1},
    "RobertaModel": {**ENCODER, "pad_token_id": 1},
    "ModernBertModel": MODERN, "ModernBertForMaskedLM": MODERN,
    "DistilBertModel": DISTIL, "DistilBertForMaskedLM": DISTIL, "CamembertModel": {**ENCODER, "pad_token_id": 1},
    "NomicBertModel": ENCODER, "NomicBertForMaskedLM": ENCODER,
    "PhimoeForCausalLM": PHIMOE,
    "PhiMoEForCausalLM": {**PHIMOE, "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": PHIMOE_ROPE},
    "InternLM3ForCausalLM": {
        **SIZES, "rms_norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 16, "qkv_bias": True, "bias": True,
        "rope_theta": 50000, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "tie_word_embeddings": False,
    },
    "MiniCPMForCausalLM": {
        **SIZES, "rms_norm_eps": 1e-5, "hidden_act": "silu", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16,
    },
}  # fmt: skip

# Class that transformers does not have -> the class that computes the same, with the same names, and its config.
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "PhiMoEForCausalLM": ("PhimoeForCausalLM", PHIMOE),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {
        **SIZES, "rms_norm_eps": 1e-5, "head_dim": 16, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }),
    "MiniCPMForCausalLM": ("GraniteForCausalLM", {
        **SIZES, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5,
        "logits_scaling": 4.0, "attention_multiplier": 0.25, "tie_word_embeddings": True,
    }),
}  # fmt: skip
