"""Fields of other servers and their clients: vLLM, SGLang, llama.cpp, Ollama, LiteLLM, Mistral, Anthropic and others.

One verdict for each. What would change the answer is in a table of refusals, with the values that ask for nothing and with what
to use instead. What cannot change it is in HARMLESS, and is left out. Without this list a name is only looked at for being a
misspelt one of ours (`unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kog_dist.gateway.openai.request_model import Refusal

# Counted, told or kept by others, of their processes and caches, and second values of samplers whose first one is refused.
HARMLESS: Final = frozenset(
    """
    additional_drop_params allowed_openai_params anthropic_beta anthropic_version api_base api_key api_type api_version base_url
    betas bootstrap_host bootstrap_port bootstrap_room cache cache_control cache_prompt caching citations
    compute_prompt_logprobs content_filter_results context_window_fallback_dict created created_at createdAt custom_llm_provider
    data_parallel_rank deployment_id detokenize draft_model draft_num_predict drop_params dry_allowed_length dry_base
    dry_penalty_last_n dry_sequence_breakers dynatemp_exponent encrypted_content extra_content extra_headers extra_key
    extra_query f16_kv fallbacks finish_reason guided_decoding_backend guided_whitespace_pattern headers id id_slot
    inference_geo input_cost_per_token keep_alive litellm_call_id litellm_metadata litellm_params litellm_session_id
    litellm_trace_id logits_all low_vram main_gpu max_parallel max_retries mirostat_eta mirostat_lr mirostat_tau
    mirostat_target mmap models model_info n_cache_reuse n_discard n_keep no-log num_batch num_ctx num_draft_tokens num_gpu
    num_keep num_retries num_thread numa object organization output_cost_per_token perf_metrics_in_response
    post_sampling_probs prompt_lookup_num_tokens provider provider_specific_fields reasoning_details repetition_context_size
    request_id request_timeout return_progress return_prompt_token_ids return_token_ids return_tokens rid route
    safetySettings safety_model seed_behavior session_id signature slot_id smoothing_curve speculative_ngram stream_reasoning
    tags thinking_blocks thought_signature timeout timestamp timings_per_token tool_name trace ttl usage use_cache use_mlock
    use_mmap user_id uuid vocab_only weight xtc_threshold
    """.split()
)

_NEUTRAL_0: Final = (None, 0)
_NEUTRAL_1: Final = (None, 1)
_NO_LIST: Final[tuple[object, ...]] = (None, [], {}, "")
_NOT_TRUE: Final = (None, False)
_NOT_FALSE: Final = (None, True)
_TEMPLATE: Final = "use chat_template_kwargs with the name that the model's template has for it, such as enable_thinking"
_SCHEMA: Final = "use response_format with a json_schema"
_NO_SUCH_SAMPLER: Final = "there is no such sampler here; docs/sampling.md lists those there are"
_NO_SUCH_PENALTY: Final = "penalties count all tokens; use repetition_penalty, presence_penalty or frequency_penalty"

# ---- of the request itself, whichever API it is for ----
REFUSED_EVERYWHERE: Final[Mapping[str, Refusal]] = {
    # the answer's end and length
    "stop_token_ids": Refusal("use stop with the text of the token", _NO_LIST),
    "stop_sequences": Refusal("use stop", _NO_LIST),
    "stop_regex": Refusal("use stop", _NO_LIST),
    "include_stop_str_in_output": Refusal("the stop string is never a part of the answer", _NOT_TRUE),
    "no_stop_trim": Refusal("the stop string is never a part of the answer", _NOT_TRUE),
    "end_id": Refusal("the end is the model's own; use stop"),
    "ban_eos_token": Refusal("use ignore_eos", _NOT_TRUE),
    "n_predict": Refusal("use max_tokens"),
    "num_predict": Refusal("use max_tokens"),
    "max_new_tokens": Refusal("use max_tokens"),
    "max_length": Refusal("use max_tokens"),
    "max_gen_len": Refusal("use max_tokens"),
    "max_tokens_to_sample": Refusal("use max_tokens"),
    "min_new_tokens": Refusal("use min_tokens", _NEUTRAL_0),
    "min_length": Refusal("use min_tokens", _NEUTRAL_0),
    "t_max_predict_ms": Refusal("use max_tokens", _NEUTRAL_0),
    "n_indent": Refusal("use stop", _NEUTRAL_0),
    # which tokens may come
    "bad_words": Refusal("use logit_bias", _NO_LIST),
    "bad_words_ids": Refusal("use logit_bias", _NO_LIST),
    "banned_strings": Refusal("use logit_bias", _NO_LIST),
    "banned_tokens": Refusal("use logit_bias", _NO_LIST),
    "custom_token_bans": Refusal("use logit_bias", _NO_LIST),
    "allowed_token_ids": Refusal("use logit_bias or response_format"),
    "allowed_tokens": Refusal("use logit_bias or response_format", _NO_LIST),
    "logits_processors": Refusal("there are none but those of docs/sampling.md", _NO_LIST),
    "custom_logit_processor": Refusal("there are none but those of docs/sampling.md", _NO_LIST),
    "custom_params": Refusal("there are none but those of docs/sampling.md", _NO_LIST),
    "vllm_xargs": Refusal("there are no plugins", _NO_LIST),
    "guided_json": Refusal(_SCHEMA),
    "guided_regex": Refusal("use response_format with a json_schema that has a pattern"),
    "guided_choice": Refusal("use response_format with a json_schema that has an enum"),
    "guided_grammar": Refusal(_SCHEMA),
    "structured_outputs": Refusal(_SCHEMA),
    "json_schema": Refusal(_SCHEMA, _NO_LIST),
    "format": Refusal(_SCHEMA, _NO_LIST),
    "output_format": Refusal(_SCHEMA),
    "output_config": Refusal(_SCHEMA, _NO_LIST),
    "regex": Refusal("use response_format with a json_schema that has a pattern", _NO_LIST),
    "ebnf": Refusal(_SCHEMA, _NO_LIST),
    "grammar": Refusal(_SCHEMA, _NO_LIST),
    # samplers and penalties
    "random_seed": Refusal("use seed"),
    "do_sample": Refusal("use temperature; 0 is greedy", _NOT_FALSE),
    "num_beams": Refusal("there is no beam search", _NEUTRAL_1),
    "beam_width": Refusal("there is no beam search", _NEUTRAL_1),
    "use_beam_search": Refusal("there is no beam search", _NOT_TRUE),
    "length_penalty": Refusal("there is no beam search", _NEUTRAL_1),
    "early_stopping": Refusal("there is no beam search", _NOT_TRUE),
    "best_of": Refusal("choices are not ranked; ask for n", _NEUTRAL_1),
    "repeat_penalty": Refusal("use repetition_penalty, which counts all tokens", _NEUTRAL_1),
    "repeat_last_n": Refusal(_NO_SUCH_PENALTY, (None, -1), counts_with=("presence_penalty", "frequency_penalty")),
    "repetition_range": Refusal(_NO_SUCH_PENALTY, (None, -1), counts_with=("presence_penalty", "frequency_penalty")),
    "penalize_nl": Refusal(_NO_SUCH_PENALTY, _NOT_FALSE, counts_with=("presence_penalty", "frequency_penalty")),
    "penalize_newline": Refusal(_NO_SUCH_PENALTY, _NOT_FALSE, counts_with=("presence_penalty", "frequency_penalty")),
    "no_repeat_ngram_size": Refusal(_NO_SUCH_PENALTY, _NEUTRAL_0),
    "encoder_repetition_penalty": Refusal(_NO_SUCH_PENALTY, _NEUTRAL_1),
    "dry_multiplier": Refusal(_NO_SUCH_PENALTY, _NEUTRAL_0),
    "typical_p": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "typ_p": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "tfs_z": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "tfs": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "top_a": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "top_n_sigma": Refusal(_NO_SUCH_SAMPLER, (None, 0, -1)),
    "nsigma": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "skew": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "xtc_probability": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "mirostat": Refusal(_NO_SUCH_SAMPLER, (None, 0, False)),
    "mirostat_mode": Refusal(_NO_SUCH_SAMPLER, (None, 0, False)),
    "dynatemp_range": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "dynamic_temperature": Refusal(_NO_SUCH_SAMPLER, _NOT_TRUE),
    "smoothing_factor": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "epsilon_cutoff": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "eta_cutoff": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "penalty_alpha": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_0),
    "guidance_scale": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "cfg_scale": Refusal(_NO_SUCH_SAMPLER, _NEUTRAL_1),
    "negative_prompt": Refusal(_NO_SUCH_SAMPLER, _NO_LIST),
    "watermark": Refusal(_NO_SUCH_SAMPLER, _NOT_TRUE),
    "min_keep": Refusal(_NO_SUCH_SAMPLER, (None, 0, 1)),
    "token_healing": Refusal("the prompt's tokens stay as they are", _NOT_TRUE),
    "samplers": Refusal("their order is fixed; docs/sampling.md", _NO_LIST),
    "sampler_order": Refusal("their order is fixed; docs/sampling.md", _NO_LIST),
    "sampler_priority": Refusal("their order is fixed; docs/sampling.md", _NO_LIST),
    "temperature_last": Refusal("the order of samplers is fixed; docs/sampling.md", _NOT_TRUE),
    # the prompt, and what is thought before the answer
    "truncate_prompt_tokens": Refusal("prompts are never cut; shorten it"),
    "prompt_truncate_len": Refusal("prompts are never cut; shorten it"),
    "context_length_exceeded_behavior": Refusal("prompts are never cut; shorten it", (None, "error")),
    "truncate": Refusal("prompts are never cut; shorten it", (None, True, False)),
    "transforms": Refusal("prompts are never cut; shorten it", _NO_LIST),
    "prompt_embeds": Refusal("the model reads text only"),
    "images": Refusal("the model reads text only", _NO_LIST),
    "image_data": Refusal("the model reads text only", _NO_LIST),
    "lora": Refusal("there are no adapters", _NO_LIST),
    "lora_path": Refusal("there are no adapters", _NO_LIST),
    "lora_request": Refusal("there are no adapters", _NO_LIST),
    "adapters": Refusal("there are no adapters", _NO_LIST),
    "safe_prompt": Refusal("send a system message", _NOT_TRUE),
    "prompt_mode": Refusal(_TEMPLATE),
    "enable_thinking": Refusal('use chat_template_kwargs: {"enable_thinking": ...}'),
    "thinking": Refusal(_TEMPLATE, _NO_LIST),
    "think": Refusal(_TEMPLATE),
    "thinking_budget": Refusal("use max_tokens, or chat_template_kwargs"),
    "thinking_token_budget": Refusal("use max_tokens, or chat_template_kwargs"),
    "reasoning_budget": Refusal("use max_tokens, or chat_template_kwargs", (None, -1)),
    "thinking_forced_open": Refusal(_TEMPLATE, _NOT_TRUE),
    "context": Refusal("nothing is stored here; send the earlier messages", _NO_LIST),
    "raw": Refusal("use /v1/completions", _NOT_TRUE),
    "template": Refusal("the template is the model's own", _NO_LIST),
    "plugins": Refusal("there are none", _NO_LIST),
    "mcp_servers": Refusal("tools are functions only", _NO_LIST),
    "data_sources": Refusal("put them into messages", _NO_LIST),
    "search_parameters": Refusal("there is no web search", _NO_LIST),
    "guardrails": Refusal("nothing is moderated", _NO_LIST),
    "moderation": Refusal("nothing is moderated"),
    "mock_response": Refusal("answers are the model's own"),
    # what the answer holds
    "skip_special_tokens": Refusal("special tokens have no text here", _NOT_FALSE),
    "spaces_between_special_tokens": Refusal("special tokens have no text here", (None, True, False)),
    "return_tokens_as_token_ids": Refusal("tokens have their text", _NOT_TRUE),
    "prompt_logprobs": Refusal("use echo with logprobs in /v1/completions"),
    "n_probs": Refusal("use logprobs", _NEUTRAL_0),
    "return_logprob": Refusal("use logprobs", _NOT_TRUE),
    "return_hidden_states": Refusal("there is nothing but text", _NOT_TRUE),
    "return_full_text": Refusal("use echo in /v1/completions", _NOT_TRUE),
    "separate_reasoning": Refusal("reasoning is always apart from the answer", _NOT_FALSE),
    "include_reasoning": Refusal("reasoning is always in the answer, apart from its text", _NOT_FALSE),
    "reasoning_format": Refusal("reasoning is always apart from the answer", (None, "auto", "deepseek", "parsed")),
    "parse_tool_calls": Refusal("calls are always read", _NOT_FALSE),
    "suffix": Refusal("use /v1/completions, of a model that fills in the middle", (None, "")),
    # whole objects of fields
    "options": Refusal("give its fields in the body itself; num_predict is max_tokens", _NO_LIST, of_harmless=True),
    "parameters": Refusal("give its fields in the body itself", _NO_LIST, of_harmless=True),
    "sampling_params": Refusal("give its fields in the body itself", _NO_LIST, of_harmless=True),
    "extra_body": Refusal("give its fields in the body itself", _NO_LIST, of_harmless=True),
    "generationConfig": Refusal("give its fields in the body itself", _NO_LIST, of_harmless=True),
}

# ---- of a message, a call of an earlier answer, a tool ----
_TEXT_ONLY: Final = Refusal("the model reads text only", _NO_LIST)
REFUSED_IN_MESSAGES: Final[Mapping[str, Refusal]] = {
    "images": _TEXT_ONLY,
    "image": _TEXT_ONLY,
    "image_url": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "video": _TEXT_ONLY,
    "files": _TEXT_ONLY,
    "attachments": _TEXT_ONLY,
    "experimental_attachments": _TEXT_ONLY,
    "function_call": Refusal("it is deprecated; use tool_calls", _NO_LIST),
}
REFUSED_IN_CALLS: Final[Mapping[str, Refusal]] = dict.fromkeys(("parameters", "args", "input"), Refusal("use arguments"))
REFUSED_IN_FUNCTIONS: Final[Mapping[str, Refusal]] = dict.fromkeys(
    ("input_schema", "inputSchema", "parametersJsonSchema", "args", "arguments"), Refusal("use parameters")
)


def is_harmless(refusal: Refusal, value: object, body: Mapping[str, object]) -> bool:
    """Whether a field that is refused asks for nothing with this value in this body."""
    if any(_same(value, neutral) for neutral in refusal.harmless):
        return True
    if refusal.counts_with:
        return not any(body.get(name) for name in refusal.counts_with)
    return refusal.of_harmless and isinstance(value, dict) and all(_asks_for_nothing(*item, value) for item in value.items())


def _asks_for_nothing(name: str, value: object, body: Mapping[str, object]) -> bool:
    refusal = REFUSED_EVERYWHERE.get(name)
    if refusal is not None and not refusal.of_harmless:
        return is_harmless(refusal, value, body)
    return value is None or name in HARMLESS


def _same(value: object, neutral: object) -> bool:
    """Numbers by their value, everything else by type as well: 1.0 is 1, and true is not."""
    is_number = type(value) in (int, float) and type(neutral) in (int, float)
    return value == neutral and (is_number or type(value) is type(neutral))
