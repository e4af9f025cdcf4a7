"""Token counts and times of an answer: OpenAI's `usage`, and `timings` with llama.cpp's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kog_dist.rpc.messages import Done

_PREDICTIONS = ("num_drafted_predictions", "num_accepted_predictions")


def usage(dones: Sequence[Done], choices_per_prompt: int) -> dict[str, object]:
    """Of all choices together; a prompt counts once, whatever `n` is. End tokens and those of stop strings count."""
    firsts = dones[::choices_per_prompt]
    cached = sum(done.num_cached_tokens for done in firsts)
    return usage_of(
        sum(done.num_prompt_tokens for done in firsts), sum(done.num_generated_tokens for done in dones), num_cached=cached
    )


def usage_of(num_prompt: int, num_generated: int, num_cached: int | None = None) -> dict[str, object]:
    """The object of chats and completions; without `prompt_tokens_details` where the cached ones are not known yet."""
    counts: dict[str, object] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return counts


def predicted_tokens(dones: Sequence[Done]) -> dict[str, int]:
    """What became of tokens that were drafted from the prediction; nothing where none were."""
    drafted, accepted = (sum(getattr(done, name) for done in dones) for name in _PREDICTIONS)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted} if drafted else {}


def draft_counts(dones: Sequence[Done]) -> dict[str, int]:
    """llama.cpp's `draft_n` and `draft_n_accepted`: tokens that were drafted, and of them those that were right; nothing where
    none were.
    """
    drafted, accepted = (sum(getattr(done, f"num_{kind}_tokens") for done in dones) for kind in ("drafted", "accepted"))
    return {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}


def response_usage(done: Done, num_reasoning: int) -> dict[str, Any]:
    """The same for the Responses API."""
    return {
        "input_tokens": done.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": done.num_prompt_tokens + done.num_generated_tokens,
    }


def timings(dones: Sequence[Done]) -> dict[str, object]:
    """Times of the ranks in ms; null where there was no such time.

    queue_ms: until the first choice was handed to the ranks, which no other time contains. prompt_n: prompt tokens that were
    not cached; prompt_ms: from the hand-over to the first token. predicted_ms: from the first token to the last, and so
    predicted_per_token_ms and predicted_per_second count the tokens after the first. Of drafts: `draft_counts`. Of several
    choices: sums, for they are decoded one after the other.
    """
    cached = sum(done.num_cached_tokens for done in dones)
    prompt_n = sum(done.num_prompt_tokens for done in dones) - cached
    predicted_n = sum(done.num_generated_tokens for done in dones)
    prefills = [done.prefill_s for done in dones if done.prefill_s is not None]
    timed = [done for done in dones if done.tokens_per_s]
    gaps = sum(done.num_generated_tokens - 1 for done in timed)
    decode_s = sum((done.num_generated_tokens - 1) / done.tokens_per_s for done in timed if done.tokens_per_s)
    prompt_s = sum(prefills) if prefills else None
    return {
        "queue_ms": _ms(dones[0].queue_s) if dones else None,
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": None if prompt_s is None or not prompt_n else _ms(prompt_s / prompt_n),
        "prompt_per_second": round(prompt_n / prompt_s, 3) if prompt_s else None,
        "predicted_n": predicted_n,
        "predicted_ms": _ms(decode_s) if timed else None,
        "predicted_per_token_ms": _ms(decode_s / gaps) if gaps and timed else None,
        "predicted_per_second": round(gaps / decode_s, 3) if decode_s else None,
        **draft_counts(dones),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
