"""Fields of other servers' requests (vLLM, SGLang, llama.cpp, Ollama): refused, or without an effect on answers."""

from collections.abc import Collection

from quire.protocol.errors import InvalidRequest, did_you_mean


def _each(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


UNSUPPORTED = {
    **_each("functions function_call", "use tools and tool_choice"),
    **_each("suffix", "write the whole prompt, with the model's own markers for filling in"),
    **_each("audio modalities", "this server writes text only"),
    **_each("web_search_options", "search in the client, and send the results in messages"),
    **_each("structural_tag guided_whitespace_pattern whitespace_pattern", "use structured_outputs or response_format"),
    **_each("disable_any_whitespace", "write the blanks into structured_outputs.grammar"),
    **_each("disable_additional_properties", "write additionalProperties into the schema"),
    **_each("format", "use response_format"),
    **_each("chat_template", "start the server with --chat-template"),
    **_each("documents", "write them into messages"),
    **_each("add_special_tokens", "the chat template writes them"),
    **_each("echo input_ids", "use /v1/completions"),
    **_each("best_of", "use n"),
    **_each("thinking enable_thinking reasoning think", "use reasoning_effort or chat_template_kwargs"),
    **_each("task", "use chat_template_kwargs"),
    **_each("include_reasoning separate_reasoning", "thoughts are in reasoning_content"),
    **_each("prompt_embeds inputs_embeds input_embeds", "this server reads text and token ids only"),
    **_each("multi_modal_data mm_features mm_payload images image_data audio_data", "this server reads text only"),
    **_each("lora lora_name lora_path lora_request lora_modules adapter", "name the adapter as model"),
    **_each("kv_transfer_params ec_transfer_params", "caches are not sent from server to server"),
    **_each("truncate_prompt_tokens", "a prompt is never shortened"),
    **_each("n_predict num_predict max_new_tokens", "use max_tokens"),
    **_each("options parameters", "write its members into the body"),
    **_each("repeat_penalty", "use repetition_penalty"),
    **_each("typical_p tfs_z top_a top_n_sigma epsilon_cutoff eta_cutoff dynatemp_range", "use top_p or min_p"),
    **_each("mirostat xtc_probability samplers", "use temperature, top_p or min_p"),
    **_each("dry_multiplier no_repeat_ngram_size", "use repetition_penalty or repetition_detection"),
    **_each("logits_processors custom_logit_processor custom_params", "use --logits-processors, and extra_args"),
    **_each("stop_regex", "use stop"),
    **_each("no_stop_trim", "use include_stop_str_in_output"),
    **_each("n_probs return_logprob logprob_token_ids token_ids_logprob", "use logprobs"),
    **_each("return_tokens_as_token_ids return_prompt_token_ids", "use return_token_ids"),
    **_each("return_token_ids", "use /v1/completions or /v1/chat/completions"),
    **_each("prompt_logprob_start routed_experts_start_len routed_experts_prompt_start", "all tokens are reported"),
    **_each(
        "return_hidden_states return_meta_info return_sampling_mask return_token_offsets return_prompt_text"
        " return_weight_versions",
        "no response has it",
    ),
    **_each("n prompt_logprobs", "this route has one answer, without them"),
    **_each("stop stop_sequences response_format", "this route has another name for it"),
    **_each("max_tokens max_completion_tokens max_output_tokens", "this route has another name for it"),
    **_each("watermark watermarking", "answers have no watermark"),
    **_each("embed_dtype endianness", "use encoding_format"),
    **_each("softmax activation apply_softmax", "use use_activation"),
    **_each("input_type", "use prompt_name"),
    **_each("truncate max_tokens_per_doc max_tokens_per_query", "use truncate_prompt_tokens"),
    **_each("instruct", "use instruction"),
    **_each("late_chunking_params embed_overrides", "send the text of each vector"),
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
ASKED_BY_FALSE = {
    *("include_reasoning", "separate_reasoning", "enable_thinking", "think", "softmax", "activation", "apply_softmax"),
}

_NO_MEDIA = "this server reads text only"
_NO_SAMPLER = "a part of a sampler that this server does not have"
_ENGINE = "the server chooses the engine"
WITHOUT_EFFECT = {
    **_each("cache_prompt", "equal prefixes are always reused"),
    **_each("id_slot slot_id", "requests have no slots"),
    **_each("n_keep n_discard", "the context is never shifted"),
    **_each("keep_alive", "the model stays loaded"),
    **_each("request_id rid", "the header X-Request-Id names a request"),
    **_each("extra_key", "use cache_salt"),
    **_each("data_parallel_rank routed_dp_rank session_id bootstrap_host bootstrap_port bootstrap_room", _ENGINE),
    **_each("guided_decoding_backend", "the server chooses it: --structured-outputs-backend"),
    **_each("stream_interval", "each step is sent"),
    **_each("truncation_side", "a prompt is never shortened"),
    **_each("spaces_between_special_tokens", "none are added"),
    **_each("timings_per_token return_cached_tokens_details return_spec_tokens_details", "/metrics has figures"),
    **_each("mm_processor_kwargs media_io_kwargs images_config video_config use_audio_in_video", _NO_MEDIA),
    **_each("repeat_last_n", "the penalty counts all tokens"),
    **_each("mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold min_keep", _NO_SAMPLER),
    **_each("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", _NO_SAMPLER),
}
"""Fields that change no answer, and why they are ignored."""


def check_supported(name: str, value: object, prefix: str) -> None:
    """Raise InvalidRequest if a field that the body does not have asks for something that is not supported."""
    asks = bool(value) or (value is not None and name in ASKED_BY_FALSE)
    if name in UNSUPPORTED and asks and value not in NEUTRAL.get(name, ()):
        raise InvalidRequest(f"{prefix}{name} is not supported: {UNSUPPORTED[name]}", prefix + name, "unsupported")


def suggest(name: str, known: Collection[str]) -> str:
    """Return what to add to a message about an unknown field: ``"; did you mean ...?"``, why it is ignored, or ""."""
    if why := WITHOUT_EFFECT.get(name):
        return f"; {why}"
    return did_you_mean(name, [each for each in known if each not in UNSUPPORTED])
