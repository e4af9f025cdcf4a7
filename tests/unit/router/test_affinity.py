"""What replicas have of a prompt is found, block by block; the tree of prefixes agrees with comparing the prompts themselves."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.router import affinity
from kog_dist.router.affinity import (
    IDS_BLOCK,
    MAX_BLOCKS,
    MAX_HOMES,
    TEXT_BLOCK_BYTES,
    Affinity,
    conversation_key,
    ids_keys,
    text_keys,
)

NAMES = ("r0", "r1", "r2")


def words(num_bytes: int, salt: str = "") -> str:
    return "".join(f"{salt}{i} " for i in range(num_bytes))[:num_bytes]


def test_each_replica_is_known_with_what_it_saw() -> None:
    seen = Affinity()
    first = words(5 * TEXT_BLOCK_BYTES)
    seen.remember(text_keys(first), "r1")
    seen.remember(text_keys(first[: 2 * TEXT_BLOCK_BYTES] + words(3 * TEXT_BLOCK_BYTES, "other")), "r0")
    assert dict(seen.find(text_keys(first + words(3 * TEXT_BLOCK_BYTES, "more")))) == {"r1": 5, "r0": 2}
    assert list(seen.find(text_keys(first))) == ["r1", "r0"], "who saw most comes first"
    assert seen.find(text_keys("!" + first)) == {}


def test_token_ids_have_keys_of_their_own() -> None:
    ids = list(range(4 * IDS_BLOCK + 3))
    assert len(ids_keys(ids)) == 4
    assert ids_keys(ids[: 2 * IDS_BLOCK]) == ids_keys(ids)[:2]
    assert not set(ids_keys(ids)) & set(text_keys(words(4 * TEXT_BLOCK_BYTES)))
    assert ids_keys([-(2**63), 2**63 - 1] * IDS_BLOCK)


def test_salts_share_nothing() -> None:
    text, ids = words(4 * TEXT_BLOCK_BYTES), list(range(4 * IDS_BLOCK))
    for keys in ([text_keys(text), text_keys(text, "a"), text_keys(text, "b")], [ids_keys(ids), ids_keys(ids, "a")]):
        assert len({key for each in keys for key in each}) == 4 * len(keys)
    assert text_keys(text, "a") == text_keys(text, "a")


def test_short_prompts_are_not_remembered() -> None:
    assert text_keys(words(TEXT_BLOCK_BYTES - 1)) == ()
    assert ids_keys(range(IDS_BLOCK - 1)) == ()


def test_long_prompts_are_known_by_their_beginning() -> None:
    assert len(text_keys("x" * (MAX_BLOCKS + 7) * TEXT_BLOCK_BYTES)) == MAX_BLOCKS
    assert len(ids_keys([1] * (MAX_BLOCKS + 7) * IDS_BLOCK)) == MAX_BLOCKS


def test_the_last_to_see_it_comes_first_and_a_lost_one_has_nothing() -> None:
    seen = Affinity()
    for name in ("r0", "r1", "r2", "r1"):
        seen.remember([conversation_key("c")], name)
    seen.remember([conversation_key("d")], "r1")
    assert list(seen.find([conversation_key("c")])) == ["r1", "r2", "r0"]
    seen.forget("r1")
    assert list(seen.find([conversation_key("c")])) == ["r2", "r0"]
    assert seen.find([conversation_key("d")]) == {}


def test_only_some_homes_are_remembered() -> None:
    seen = Affinity()
    for i in range(MAX_HOMES + 5):
        seen.remember([b"key"], f"r{i}")
    assert list(seen.find([b"key"])) == [f"r{i}" for i in range(MAX_HOMES + 4, 4, -1)]


def test_memory_is_bounded_and_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_KEYS", 10)
    seen = Affinity()
    for i in range(30):
        seen.remember([b"kept"], "r0")
        seen.remember([f"{i}".encode()], "r1")
    assert seen.find([b"kept"]) == {"r0": 1}
    assert [i for i in range(30) if seen.find([f"{i}".encode()])] == list(range(21, 30))


def test_of_a_prompt_the_end_is_forgotten_before_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_KEYS", 10)
    seen, first = Affinity(), ids_keys(list(range(6 * IDS_BLOCK)))
    seen.remember(first, "r0")
    seen.remember(ids_keys(list(range(1, 7 * IDS_BLOCK + 1))), "r1")
    assert seen.find(first) == {"r0": 3}


def len_common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


PROMPTS = st.lists(st.integers(0, 1), max_size=8)  # each stands for one block of equal ids, so that many begin alike


@given(
    served=st.lists(st.tuples(PROMPTS, st.sampled_from(NAMES)), max_size=12), asked=PROMPTS, lost=st.sampled_from([None, *NAMES])
)
def test_the_tree_finds_what_comparing_all_prompts_finds(
    served: list[tuple[list[int], str]], asked: list[int], lost: str | None
) -> None:
    seen = Affinity()
    for prompt, name in served:
        seen.remember(ids_keys([block for block in prompt for _ in range(IDS_BLOCK)]), name)
    if lost is not None:
        seen.forget(lost)
    common = [(name, len_common(prompt, asked)) for prompt, name in served if name != lost]
    longest = {name: max(length for other, length in common if other == name) for name, _ in common}
    found = seen.find(ids_keys([block for block in asked for _ in range(IDS_BLOCK)]))
    assert dict(found) == {name: length for name, length in longest.items() if length}
    assert list(found.values()) == sorted(found.values(), reverse=True)
