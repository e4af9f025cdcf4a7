"""The beginning of a prompt is found where it was seen, and only when it is most of the prompt."""

from __future__ import annotations

import pytest

from kog_dist.router import affinity
from kog_dist.router.affinity import IDS_BLOCK, MAX_BLOCKS, TEXT_BLOCK_BYTES, Affinity, conversation_keys, ids_keys, text_keys


def words(num_bytes: int, salt: str = "") -> str:
    return "".join(f"{salt}{i} " for i in range(num_bytes))[:num_bytes]


def test_continuation_is_found_and_another_text_is_not() -> None:
    seen = Affinity()
    first = words(5 * TEXT_BLOCK_BYTES)
    seen.remember(text_keys(first), "r1")
    assert seen.find(text_keys(first + words(3 * TEXT_BLOCK_BYTES, "more"))) == ("r1",)
    assert seen.find(text_keys("!" + first)) == ()


def test_shared_system_prompt_is_no_reason_to_queue() -> None:
    seen = Affinity()
    system = words(3 * TEXT_BLOCK_BYTES)
    seen.remember(text_keys(system + words(5 * TEXT_BLOCK_BYTES, "a")), "r0")
    assert seen.find(text_keys(system + words(3 * TEXT_BLOCK_BYTES, "b"))) == ("r0",), "half of it is known"
    assert seen.find(text_keys(system + words(4 * TEXT_BLOCK_BYTES, "b"))) == ()


def test_token_ids_have_keys_of_their_own() -> None:
    ids = list(range(4 * IDS_BLOCK + 3))
    assert len(ids_keys(ids)) == 4
    assert ids_keys(ids[: 2 * IDS_BLOCK]) == ids_keys(ids)[:2]
    assert not set(ids_keys(ids)) & set(text_keys(words(4 * TEXT_BLOCK_BYTES)))
    assert ids_keys([-(2**63), 2**63 - 1] * IDS_BLOCK)


def test_short_prompts_are_not_remembered() -> None:
    assert text_keys(words(TEXT_BLOCK_BYTES - 1)) == ()
    assert ids_keys(range(IDS_BLOCK - 1)) == ()


def test_long_prompts_are_known_by_their_beginning() -> None:
    assert len(text_keys("x" * (MAX_BLOCKS + 7) * TEXT_BLOCK_BYTES)) == MAX_BLOCKS
    assert len(ids_keys([1] * (MAX_BLOCKS + 7) * IDS_BLOCK)) == MAX_BLOCKS


def test_conversation_is_found_by_its_name() -> None:
    seen = Affinity()
    seen.remember(conversation_keys("c-1"), "r2")
    assert seen.find(conversation_keys("c-1")) == ("r2",)
    assert seen.find(conversation_keys("c-2")) == ()


def test_the_last_to_see_it_comes_first_and_a_lost_one_has_nothing() -> None:
    seen = Affinity()
    for name in ("r0", "r1", "r2", "r1"):
        seen.remember(conversation_keys("c"), name)
    seen.remember(conversation_keys("d"), "r1")
    assert seen.find(conversation_keys("c")) == ("r1", "r2", "r0")
    seen.forget("r1")
    assert (seen.find(conversation_keys("c")), seen.find(conversation_keys("d"))) == (("r2", "r0"), ())


def test_only_some_homes_are_remembered() -> None:
    seen = Affinity()
    for i in range(9):
        seen.remember(conversation_keys("c"), f"r{i}")
    assert seen.find(conversation_keys("c")) == ("r8", "r7", "r6", "r5")


def test_memory_is_bounded_and_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_KEYS", 10)
    seen = Affinity()
    for i in range(30):
        seen.remember(conversation_keys("kept"), "r0")
        seen.remember(conversation_keys(str(i)), "r1")
    assert seen.find(conversation_keys("kept")) == ("r0",)
    assert [i for i in range(30) if seen.find(conversation_keys(str(i)))] == list(range(21, 30))
