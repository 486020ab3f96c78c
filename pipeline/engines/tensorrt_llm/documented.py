"""Every name of TensorRT-LLM that this backend speaks, with where it is documented.

TensorRT-LLM cannot be installed where this is developed, so names are not tried but looked up: a test takes each
command line, request, configuration file and checkpoint that the backend makes, and finds every name of it here.
At run time the probe asks the installed version for its own names, and ``preflight`` refuses what it lacks.

The values say what a name takes, in the words of the stand-ins under ``tests/`` that refuse everything else:
``int``, ``float``, ``text``, ``path``, ``flag`` (no value), or the choices between ``|``.
"""

from __future__ import annotations

_DTYPES = "auto|float16|float32|bfloat16|int32|disable"
_SWITCH = "enable|disable"

# https://nvidia.github.io/TensorRT-LLM/commands/trtllm-build.html; parse_arguments in
# tensorrt_llm/commands/build.py and add_plugin_argument in tensorrt_llm/plugin/plugin.py, 1.0 to 1.2.
BUILD_FLAGS = {
    "--checkpoint_dir": "path",
    "--model_config": "path",
    "--build_config": "path",
    "--model_cls_file": "path",
    "--model_cls_name": "text",
    "--output_dir": "path",
    "--max_batch_size": "int",
    "--max_input_len": "int",
    "--max_seq_len": "int",
    "--max_decoder_seq_len": "int",
    "--max_beam_width": "int",
    "--max_num_tokens": "int",
    "--opt_num_tokens": "int",
    "--max_encoder_input_len": "int",
    "--max_prompt_embedding_table_size": "int",
    "--kv_cache_type": "continuous|paged|disabled",
    "--input_timing_cache": "path",
    "--output_timing_cache": "path",
    "--profiling_verbosity": "layer_names_only|detailed|none",
    "--strip_plan": "flag",
    "--weight_sparsity": "flag",
    "--weight_streaming": "flag",
    "--fast_build": "flag",
    "--workers": "int",
    "--log_level": "internal_error|error|warning|info|verbose|debug|trace",
    "--enable_debug_output": "flag",
    "--visualize_network": "path",
    "--dry_run": "flag",
    "--monitor_memory": "flag",
    "--logits_dtype": "float16|float32",
    "--gather_context_logits": "flag",
    "--gather_generation_logits": "flag",
    "--gather_all_token_logits": "flag",
    "--bert_attention_plugin": _DTYPES,
    "--gpt_attention_plugin": _DTYPES,
    "--gemm_plugin": "auto|float16|float32|bfloat16|int32|fp8|nvfp4|disable",
    "--nccl_plugin": _DTYPES,
    "--lora_plugin": _DTYPES,
    "--moe_plugin": _DTYPES,
    "--mamba_conv1d_plugin": _DTYPES,
    "--gemm_swiglu_plugin": "fp8|disable",
    "--low_latency_gemm_plugin": "fp8|disable",
    "--low_latency_gemm_swiglu_plugin": "fp8|disable",
    "--fp8_rowwise_gemm_plugin": _DTYPES,
    "--gemm_allreduce_plugin": "float16|bfloat16|disable",
    "--dora_plugin": _SWITCH,
    "--context_fmha": _SWITCH,
    "--bert_context_fmha_fp32_acc": _SWITCH,
    "--remove_input_padding": _SWITCH,
    "--tokens_per_block": "int",
    "--use_paged_context_fmha": _SWITCH,
    "--use_fp8_context_fmha": _SWITCH,
    "--fuse_fp4_quant": _SWITCH,
    "--multiple_profiles": _SWITCH,
    "--streamingllm": _SWITCH,
    "--norm_quant_fusion": _SWITCH,
    "--reduce_fusion": _SWITCH,
    "--user_buffer": _SWITCH,
    "--pp_reduce_scatter": _SWITCH,
    "--paged_state": _SWITCH,
    "--use_fused_mlp": _SWITCH,
}

# The command `serve` in tensorrt_llm/commands/serve.py, of the time of 1.2 (BuildConfig is a pydantic model there);
# https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/trtllm-serve.html.
SERVE_OPTIONS = {
    "--tokenizer": "path",
    "--host": "text",
    "--port": "int",
    "--backend": "pytorch|tensorrt|trt|_autodeploy",
    "--log_level": "internal_error|error|warning|info|verbose|debug|trace",
    "--max_beam_width": "int",
    "--max_batch_size": "int",
    "--max_num_tokens": "int",
    "--max_seq_len": "int",
    "--tensor_parallel_size": "int",
    "--tp_size": "int",
    "--pipeline_parallel_size": "int",
    "--pp_size": "int",
    "--context_parallel_size": "int",
    "--cp_size": "int",
    "--moe_expert_parallel_size": "int",
    "--ep_size": "int",
    "--moe_cluster_parallel_size": "int",
    "--cluster_size": "int",
    "--gpus_per_node": "int",
    "--free_gpu_memory_fraction": "float",
    "--kv_cache_free_gpu_memory_fraction": "float",
    "--num_postprocess_workers": "int",
    "--trust_remote_code": "flag",
    "--revision": "text",
    "--config": "path",
    "--extra_llm_api_options": "path",
    "--reasoning_parser": "text",
    "--tool_parser": "text",
    "--fail_fast_on_attention_window_too_large": "flag",
    "--otlp_traces_endpoint": "text",
    "--enable_chunked_prefill": "flag",
    "--chat_template": "text",
}

# CompletionRequest in tensorrt_llm/serve/openai_protocol.py; it forbids every other field. `detokenize` false gives
# token ids instead of text: pull request 5382, merged before 1.0.
COMPLETION_FIELDS = frozenset({
    *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
    *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
    *("lora_request", "use_beam_search", "top_k", "top_p_min", "min_p", "repetition_penalty", "length_penalty"),
    *("early_stopping", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "return_context_logits"),
    *("detokenize", "add_special_tokens", "response_format", "disaggregated_params"),
})  # fmt: skip

# What `--extra_llm_api_options` may hold: the LLM's arguments (TrtLlmArgs and TorchLlmArgs have these in common) in
# tensorrt_llm/llmapi/llm_args.py; https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html.
LLM_FIELDS = frozenset({
    *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size"),
    *("dtype", "revision", "tokenizer_revision", "pipeline_parallel_size", "context_parallel_size", "gpus_per_node"),
    *("load_format", "enable_lora", "lora_config", "kv_cache_config", "enable_chunked_prefill"),
    *("guided_decoding_backend", "scheduler_config", "speculative_config", "max_batch_size", "max_input_len"),
    *("max_seq_len", "max_beam_width", "max_num_tokens", "gather_generation_logits", "num_postprocess_workers"),
    "return_perf_metrics",
})  # fmt: skip

# Arguments of tensorrt_llm._tensorrt_engine.LLM alone (class TrtLlmArgs). The PyTorch LLM refuses them by name.
TRT_LLM_FIELDS = frozenset({
    *("enable_tqdm", "workspace", "enable_build_cache", "extended_runtime_perf_knob_config", "calib_config"),
    *("quant_config", "embedding_parallel_mode", "fast_build", "build_config", "enable_prompt_adapter"),
    *("max_prompt_adapter_token", "batching_type", "normalize_log_probs"),
})  # fmt: skip

# class KvCacheConfig in tensorrt_llm/llmapi/llm_args.py.
KV_CACHE_FIELDS = frozenset({
    *("enable_block_reuse", "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction"),
    *("host_cache_size", "onboard_blocks", "cross_kv_cache_fraction", "secondary_offload_min_priority"),
    *("event_buffer_max_size", "enable_partial_reuse", "copy_on_partial_reuse", "use_uvm", "max_gpu_total_bytes"),
    *("dtype", "tokens_per_block"),
})  # fmt: skip

# class BuildConfig in tensorrt_llm/builder.py: the LLM API's sizes, and `build_config` of an engine's config.json.
BUILD_CONFIG_FIELDS = frozenset({
    *("max_input_len", "max_seq_len", "opt_batch_size", "max_batch_size", "max_beam_width", "max_num_tokens"),
    *("opt_num_tokens", "max_prompt_embedding_table_size", "kv_cache_type", "gather_context_logits"),
    *("gather_generation_logits", "strongly_typed", "force_num_profiles", "profiling_verbosity"),
    *("enable_debug_output", "max_draft_len", "speculative_decoding_mode", "use_refit", "input_timing_cache"),
    *("output_timing_cache", "lora_config", "weight_sparsity", "weight_streaming", "plugin_config"),
    *("use_strip_plan", "max_encoder_input_len", "dry_run", "visualize_network", "monitor_memory", "use_mrope"),
})  # fmt: skip

# class PluginConfig in tensorrt_llm/plugin/plugin.py: the plugin flags of trtllm-build without their dashes.
# use_fused_mlp is an argument of the build and not recorded there.
PLUGIN_FIELDS = frozenset(
    flag.removeprefix("--")
    for flag in BUILD_FLAGS
    if flag.endswith("_plugin") or BUILD_FLAGS[flag] == _SWITCH or flag == "--tokens_per_block"
) - {"use_fused_mlp"}

# An engine's config.json: EngineConfig.to_dict in tensorrt_llm/builder.py.
ENGINE_CONFIG = frozenset({"version", "pretrained_config", "build_config"})

# A TensorRT-LLM checkpoint's config.json: https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html and what
# ModelOpt's export_tensorrt_llm_checkpoint writes (modelopt/torch/export/tensorrt_llm_utils.py, 0.37 to 0.47);
# `model_type`, `rotary_scaling`, `qwen_type` are patches of tensorrt_llm/quantization/quantize_by_modelopt.py.
CHECKPOINT_CONFIG = frozenset({
    *("producer", "architecture", "dtype", "logits_dtype", "vocab_size", "max_position_embeddings", "hidden_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size", "hidden_act"),
    *("intermediate_size", "norm_epsilon", "position_embedding_type", "use_parallel_embedding"),
    *("embedding_sharding_dim", "share_embedding_table", "mapping", "quantization", "residual_mlp", "bias"),
    *("rotary_pct", "rotary_base", "rotary_scaling", "rank", "decoder", "rmsnorm", "lm_head_bias", "model_type"),
    "qwen_type",
})  # fmt: skip
MAPPING_FIELDS = frozenset({"world_size", "tp_size", "pp_size"})
# class QuantConfig in tensorrt_llm/models/modeling_utils.py.
QUANTIZATION_FIELDS = frozenset({
    *("quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe"),
    *("has_zero_point", "pre_quant_scale", "exclude_modules", "mamba_ssm_cache_dtype"),
})  # fmt: skip

# class QuantAlgo in tensorrt_llm/quantization/mode.py; those that ModelOpt makes.
QUANT_ALGOS = frozenset({"W8A8_SQ_PER_CHANNEL", "FP8", "W4A16_AWQ"})
KV_CACHE_QUANT_ALGOS = frozenset({"FP8", "INT8"})

# Tensors of a decoder in a TensorRT-LLM checkpoint, `N` for a layer's number: the same sources as CHECKPOINT_CONFIG,
# and the parameters of Int8SmoothQuantLinear, FP8Linear and WeightOnlyGroupwiseQuantLinear in
# tensorrt_llm/quantization/layers.py.
_LINEAR = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
_OF_LINEAR = ("weight", "bias", "weights_scaling_factor", "activation_scaling_factor", "prequant_scaling_factor")
TENSORS = frozenset({
    *("transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"),
    *(f"transformer.layers.N.{norm}.weight" for norm in ("input_layernorm", "post_layernorm")),
    *(f"transformer.layers.N.{linear}.{part}" for linear in _LINEAR for part in _OF_LINEAR),
    *(f"transformer.layers.N.attention.{which}_cache_scaling_factor" for which in ("k", "v", "kv")),
})  # fmt: skip

# Python names that the worker imports inside TensorRT-LLM's environment: the examples of the LLM API
# (examples/llm-api/_tensorrt_engine/quickstart_example.py), what ModelOpt itself imports from TensorRT-LLM, and the
# modules of the classes above.
IMPORTS = frozenset({
    "tensorrt_llm",
    "tensorrt_llm.BuildConfig",
    "tensorrt_llm.SamplingParams",
    "tensorrt_llm._tensorrt_engine.LLM",
    "tensorrt_llm.llmapi.KvCacheConfig",
    "tensorrt_llm.llmapi.llm_args.TorchLlmArgs",
    "tensorrt_llm.llmapi.llm_args.TrtLlmArgs",
    "tensorrt_llm.models.MODEL_MAP",
    "tensorrt_llm.models.modeling_utils.Mapping",
    "tensorrt_llm.models.modeling_utils.QuantConfig",
    "tensorrt_llm.serve.openai_protocol.CompletionRequest",
})  # fmt: skip

# Lines of trtllm-build's log: tensorrt_llm/builder.py and tensorrt_llm/commands/build.py.
LOG_PEAK_MEMORY = r"Build phase peak memory: ([\d.]+) MB, children: ([\d.]+) MB"
LOG_TOTAL_TIME = r"Total time of building all engines: (\d+):(\d\d):(\d\d)"
LOG_GPU_MEMORY = r"Requested amount of GPU memory(?: \((\d+) bytes\))?"
