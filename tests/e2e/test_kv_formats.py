"""Engines on CPU ranks with narrow KV caches, asked over RPC: any number of ranks, and kept prefixes, give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.bench.engine.session import running
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens

PROMPT_IDS = tuple(17 * k % 251 + 3 for k in range(40))
NUM_TOKENS = 16


def ask(client: Client, prompt_ids: tuple[int, ...], *, reuse_kv: bool) -> tuple[list[int], list[str], int]:
    """Tokens, digests of their logits, and how many positions were kept from earlier requests."""
    *events, last = client.generate(
        prompt_ids=prompt_ids, max_tokens=NUM_TOKENS, ignore_eos=True, reuse_kv=reuse_kv, logit_digests=True, timeout_s=60.0
    )
    assert isinstance(last, Done)
    told = [event for event in events if isinstance(event, Tokens)]
    tokens, digests = ([one for event in told for one in getattr(event, name)] for name in ("token_ids", "digests"))
    return tokens, digests, last.num_cached_tokens


@pytest.mark.timeout(300)
def test_answers_are_the_same_on_any_ranks_and_after_kept_prefixes(demo_model: Path) -> None:
    answers = {}
    for name, ranks in (("float32", 1), *((name, ranks) for name in KV_FORMATS for ranks in (1, 2))):
        with running(str(demo_model), "--device=cpu", f"--ranks={ranks}", f"--kv-dtype={name}") as (_, client):
            tokens, digests, _ = ask(client, PROMPT_IDS, reuse_kv=False)
            longer = (*PROMPT_IDS, *tokens[:8], 77)
            again, fresh = (ask(client, longer, reuse_kv=reuse_kv) for reuse_kv in (True, False))
            assert again[2] > len(PROMPT_IDS), "what the first answer left is used"
            assert again[:2] == fresh[:2]
            answers[name, ranks] = digests, fresh[1]
    for name in KV_FORMATS:
        assert answers[name, 1] == answers[name, 2]
    assert len({answers[name, 1][0][0] for name in ("float32", *KV_FORMATS)}) == 1 + len(KV_FORMATS), "each format has its own"
