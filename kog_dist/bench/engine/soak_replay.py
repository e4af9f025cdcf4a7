"""A recorded stream beside its replay, which runs to its end on an engine that has nothing else to do."""

from __future__ import annotations

import itertools
from dataclasses import replace

from kog_dist.bench.engine.soak_client import Record, SoakClient
from kog_dist.bench.engine.soak_requests import Fate, SoakRequest
from kog_dist.rpc.messages import Done, Generate
from kog_dist.speculation import Speculation

TIE = 0.02  # difference of log-probabilities that roundings can turn over: logits have a standard deviation of 1
_NUM_ALTERNATIVES = 5


def replay_of(record: Record, replayer: SoakClient) -> Record:
    """The same request without what had ended it, without kept caches, and without drafts."""
    return _ask(replayer, record.planned.message)


def _ask(replayer: SoakClient, message: Generate) -> Record:
    alone = replace(message, deadline_s=None, reuse_kv=False, speculate=Speculation.OFF, prediction_ids=None)
    (replay,) = replayer.ask([SoakRequest(alone, Fate.COMPLETE)])
    return replay


def compare(record: Record, replay: Record) -> list[str]:
    """Findings about a stream beside its replay, which was let run to its end: the same, or an exact beginning of it."""
    request_id = record.planned.message.request_id
    if not replay.is_whole:
        return [f"{request_id}: the replay ended with {replay.end}"]
    findings = list(replay.findings)
    for name in ("token_ids", "digests", "logprobs"):
        found, wanted = getattr(record, name), getattr(replay, name)
        if found != wanted[: len(found)] or (record.is_whole and len(found) != len(wanted)):
            findings.append(f"{request_id}: {name} {found} are not those of the replay, {wanted}")
    if record.is_whole:
        assert isinstance(record.end, Done), "a whole answer has its Done"
        assert isinstance(replay.end, Done), "a whole answer has its Done"
        if record.text != replay.text:
            findings.append(f"{request_id}: the text {record.text!r} is not that of the replay, {replay.text!r}")
        if record.end.finish_reason != replay.end.finish_reason:
            findings.append(f"{request_id}: finished with {record.end.finish_reason}, the replay with {replay.end.finish_reason}")
    return findings


def compare_rounded(record: Record, replay: Record, replayer: SoakClient) -> tuple[list[str], int]:
    """The same for greedy tokens behind kept positions that were decoded, which the replay prefills: findings, and ties.

    Prefill rounds otherwise than decoding. Where a token differs, both must have been about equally likely; then another replay
    goes on behind it.
    """
    message, num_ties = record.planned.message, 0
    assert message.prompt_ids is not None, "the mix lets only these use kept positions"
    assert message.max_tokens is not None, "every request of the mix has a limit"
    begun, rest = 0, record.token_ids
    while replay.is_whole and (same := _num_same(rest, replay.token_ids)) < len(rest):
        place = begun + same
        behind = replace(message, prompt_ids=(*message.prompt_ids, *record.token_ids[:place]))
        alternatives = _ask(
            replayer, replace(behind, max_tokens=1, sampling=replace(behind.sampling, logprobs=_NUM_ALTERNATIVES))
        )
        likely = dict(alternatives.top)
        if likely.get(rest[same], float("-inf")) < max(likely.values(), default=0.0) - TIE:
            words = f"token {place} is {rest[same]}, the best are {alternatives.top}"
            return [f"{message.request_id}: {words}", *replay.findings], num_ties
        num_ties, begun, rest = num_ties + 1, place + 1, record.token_ids[place + 1 :]
        if not rest:
            return [], num_ties
        following = replace(behind, prompt_ids=(*message.prompt_ids, *record.token_ids[:begun]))
        replay = _ask(replayer, replace(following, max_tokens=message.max_tokens - begun))
    if num_ties == 0:
        return compare(record, replay), 0
    longer = record.is_whole and len(replay.token_ids) != len(rest)
    return [*replay.findings, *([f"{message.request_id}: the replay goes on"] if longer else [])], num_ties


def _num_same(first: list[int], second: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
