"""Fields of other servers' requests (vLLM, SGLang, llama.cpp, Ollama): refused, or without an effect on answers."""

from collections.abc import Collection

from quire.protocol.errors import InvalidRequest, did_you_mean

_NO_RESPONSE = "no response has it"


def _each(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


UNSUPPORTED = {
    **_each("functions function_call", "use tools and tool_choice"),
    **_each("suffix", "write the whole prompt, with the model's own markers for filling in"),
    **_each("audio modalities", "this server writes text only"),
    **_each("web_search_options", "search in the client, and send the results in messages"),
    **_each("structural_tag format guided_whitespace_pattern", "use structured_outputs or response_format"),
    **_each("whitespace_pattern disable_any_whitespace disable_additional_properties", "write it into the schema"),
    **_each("chat_template template", "start the server with --chat-template"),
    **_each("documents context", "write it into messages"),
    **_each("add_special_tokens", "the chat template writes them"),
    **_each("echo input_ids best_of", "use /v1/completions"),
    **_each("thinking enable_thinking reasoning think task", "use reasoning_effort or chat_template_kwargs"),
    **_each("include_reasoning separate_reasoning", "thoughts are in reasoning_content"),
    **_each("prompt_embeds", "use /v1/completions"),
    **_each("inputs_embeds input_embeds", "use prompt_embeds of /v1/completions, with --enable-prompt-embeds"),
    **_each("mm_features multi_modal_data mm_payload images", "images are parts of messages"),
    **_each("lora lora_name lora_path lora_request lora_modules adapter", "name the adapter as model"),
    **_each("kv_transfer_params ec_transfer_params", "caches are not sent from server to server"),
    **_each("truncate_prompt_tokens", "a prompt is never shortened"),
    **_each("n_predict num_predict max_new_tokens", "use max_tokens"),
    **_each("stop stop_sequences response_format", "this route has another name for it"),
    **_each("max_tokens max_completion_tokens max_output_tokens", "this route has another name for it"),
    **_each("n prompt_logprobs return_token_ids session", "use /v1/chat/completions or /v1/completions"),
    **_each("use_beam_search", "use /v1/chat/completions or /v1/completions"),
    **_each("_debug_render_only", "use /tokenize"),
    **_each("repeat_penalty no_repeat_ngram_size dry_multiplier", "use repetition_penalty"),
    **_each("typical_p tfs_z top_a top_n_sigma epsilon_cutoff eta_cutoff dynatemp_range", "use top_p or min_p"),
    **_each("mirostat xtc_probability samplers", "use temperature, top_p or min_p"),
    **_each("logits_processors custom_logit_processor custom_params", "use --logits-processors, and extra_args"),
    **_each("stop_regex no_stop_trim", "use stop and include_stop_str_in_output"),
    **_each("n_probs return_logprob logprob_token_ids token_ids_logprob", "use logprobs"),
    **_each("return_tokens_as_token_ids return_prompt_token_ids", "use return_token_ids"),
    **_each("return_hidden_states return_meta_info return_sampling_mask return_weight_versions", _NO_RESPONSE),
    **_each("return_token_offsets return_prompt_text prompt_logprob_start watermark watermarking", _NO_RESPONSE),
    **_each("routed_experts_start_len routed_experts_prompt_start", "all tokens are reported"),
    **_each(
        "embed_dtype endianness input_type softmax activation apply_softmax instruct", "use those of docs/pooling.md"
    ),
    **_each("truncate max_tokens_per_doc max_tokens_per_query", "use truncate_prompt_tokens"),
}
"""Fields that change the meaning of a request and are not supported, with what to do instead."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    **dict.fromkeys(("best_of", "n"), (1,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), (True,)),
    **dict.fromkeys(("truncate_prompt_tokens", "n_predict", "num_predict", "top_n_sigma"), (-1,)),
    **dict.fromkeys(("repeat_penalty", "typical_p", "tfs_z"), (1,)),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
"""Values of these fields that ask for nothing, as false, 0 and empty ones of all but ASKED_BY_FALSE do."""
ASKED_BY_FALSE = ("include_reasoning", "separate_reasoning", "enable_thinking", "think", "softmax", "activation")

WITHOUT_EFFECT = {
    **_each("cache_prompt", "equal prefixes are always reused"),
    **_each(
        "num_ctx num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock vocab_only "
        "logits_all embedding_only draft_num_predict",
        "flags of the server say how the model is loaded",
    ),
    **_each("id_slot slot_id n_keep n_discard", "requests have no slots, and the context is never shifted"),
    **_each("request_id rid", "the header X-Request-Id names a request"),
    **_each("extra_key", "use cache_salt"),
    **_each("data_parallel_rank session_id bootstrap_host bootstrap_room", "the server chooses the engine"),
    **_each("guided_decoding_backend", "the server chooses it: --structured-outputs-backend"),
    **_each("stream_interval spaces_between_special_tokens keep_alive", "it changes no answer"),
    **_each("truncation_side", "a prompt is never shortened"),
    **_each("timings_per_token return_cached_tokens_details return_spec_tokens_details", "/metrics has figures"),
    **_each(
        "mm_processor_kwargs media_io_kwargs images_config video_config detail",
        "the checkpoint's processor has its own",
    ),
    **_each(
        "repeat_last_n mirostat_tau mirostat_eta xtc_threshold dry_base dry_allowed_length", "it has no effect alone"
    ),
}
"""Fields that change no answer, and why they are ignored."""


def check_supported(name: str, value: object, prefix: str) -> None:
    """Raise InvalidRequest if a field that the body does not have asks for something that is not supported."""
    asks = bool(value) or (value is not None and name in ASKED_BY_FALSE)
    if name in UNSUPPORTED and asks and value not in NEUTRAL.get(name, ()):
        raise InvalidRequest(f"{prefix}{name} is not supported: {UNSUPPORTED[name]}", prefix + name, "unsupported")


def suggest(name: str, known: Collection[str]) -> str:
    """Return what to add to a message about an unknown field: ``"; did you mean ...?"``, why it is ignored, or ""."""
    if why := WITHOUT_EFFECT.get(name.removeprefix("options.")):
        return f"; {why}"
    return did_you_mean(name, [each for each in known if each not in UNSUPPORTED])
