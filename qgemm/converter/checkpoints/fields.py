"""Config fields that do not change the weights of a checkpoint: calibration, and the kernels that use them.

Lists of modules that stay plain are among them: the tensors of a module show whether it is quantized.
"""

from __future__ import annotations

COMMON = frozenset((
    "quant_method", "method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore",
    "exclude_modules", "skip_modules", "backend", "meta", "producer", "kv_cache_scheme", "kv_cache_quant_algo",
    "dequantize", "lm_head", "transformers_version",
))  # fmt: skip

# Calibration, preferred kernels, and treatment of activations, of GPTQ's, AWQ's and auto-round's quantizers.
CALIBRATION = frozenset((
    "tokenizer", "dataset", "damp_percent", "damp_auto_increment", "act_group_aware", "true_sequential",
    "static_groups", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size",
    "pad_token_id", "max_input_length", "mse", "gptaq", "foem", "cache_block_outputs",
    "modules_in_block_to_quantize", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "iters",
    "model_name_or_path", "model_file_base_name", "lr", "minmax_lr", "nsamples", "seqlen", "low_gpu_mem_usage",
    "enable_quanted_input", "amp", "enable_minmax_tuning", "gradient_accumulate_steps", "autoround_version",
    "quant_nontext_module", "to_quant_block_names", "enable_norm_bias_tuning", "zero_point", "do_fuse",
    "modules_to_fuse", "fuse_max_seq_len", "calibration", "samples", "uri", "act_group_size", "act_sym", "act_dynamic",
    "act_data_type", "scale_dtype", "quant_block_list", "supported_types", "static_kv_dtype", "static_attention_dtype",
    "static_kv_granularity", "static_attention_granularity",
))  # fmt: skip
BITSANDBYTES = frozenset((
    "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
))  # fmt: skip
