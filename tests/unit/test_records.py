"""`kog_dist.records.dataclass` and the library's give the same classes, as far as anybody can see."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar

import pytest

from kog_dist import records
from kog_dist.model.rope_scaling import Llama3Scaling

OPTIONS: list[dict[str, bool]] = [
    {}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"eq": False}, {"frozen": True, "eq": False},
    {"frozen": True, "slots": True, "eq": False}, {"kw_only": True, "frozen": True},
]  # fmt: skip
EITHER: list[Callable[..., Any]] = [dataclasses.dataclass, records.dataclass]


def made(decorator: Callable[..., Any], **options: bool) -> tuple[type[Any], type[Any], type[Any]]:
    """A class with fields of all kinds, one that inherits from it, and one of a single field."""

    @decorator(**options)
    class Pair:
        """Two and more."""

        NAMES: ClassVar[tuple[str, ...]] = ("a", "b")
        a: int
        b: list[int] = field(default_factory=list)
        c: str = field(default="c", repr=False, compare=False)
        d: tuple[int, ...] = field(default=(), metadata={"unit": "s"})

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("below 0")

        def sum(self) -> int:
            return self.a + sum(self.b)

    @decorator(**options)
    class Three(Pair):
        e: float = 0.5

    @decorator(**options)
    class One:
        only: Any

    return Pair, Three, One


def outcome(do: Callable[[], Any]) -> Any:
    """What it gives, or the error that it raises."""
    try:
        return do()
    except Exception as error:
        return type(error), str(error)


def looked_at(pair: type[Any], three: type[Any], one: type[Any]) -> list[Any]:
    """What can be seen of the classes of `made`."""
    p, t = pair(a=1, b=[2]), three(a=1, c="other", e=2.0)
    return [
        repr(p), repr(t), repr(one(only=(1,))), p.sum(),
        p == pair(a=1, b=[2], c="not compared"), p == pair(a=2), p != pair(a=1, b=[2]), p == t, t == p, p == 1,
        one(only=3) == one(only=3), one(only=3) == one(only=4),
        outcome(pair), outcome(lambda: pair(1, [2], "c", (3,)).d), outcome(lambda: pair(a=-1)), outcome(lambda: pair(a=1, z=2)),
        outcome(lambda: setattr(p, "a", 5)), outcome(lambda: setattr(t, "e", 5)), outcome(lambda: delattr(p, "c")),
        getattr(p, "__dict__", None), hasattr(pair, "__slots__"),
        pair.__hash__ is None, three.__hash__ is None, outcome(lambda: hash(p) and None),
        "__eq__" not in vars(one) or outcome(lambda: hash(one(only=3)) == hash(one(only=3))),
        [(f.name, f.default, f.metadata) for f in dataclasses.fields(three)], dataclasses.asdict(t), dataclasses.astuple(t),
        dataclasses.replace(t, a=7).a, pair.__match_args__, pair.__doc__, pair.NAMES, pair(a=1).b is not pair(a=1).b,
        [getattr(copied, "e", None) for copied in (copy.copy(t), copy.deepcopy(t))],
    ]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
def test_instances_behave_alike(options: dict[str, bool]) -> None:
    library, own = (looked_at(*made(decorator, **options)) for decorator in EITHER)
    assert library == own


@records.dataclass(frozen=True, slots=True)
class Kept:
    """Of this module, so that pickle finds it."""

    a: int
    b: str = "b"


def test_frozen_ones_with_slots_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Kept(3, "c"))) == Kept(3, "c")  # noqa: S301
    assert {Kept(1), Kept(1), Kept(2)} == {Kept(2), Kept(1)}
    match Kept(4, "d"):
        case Kept(a, b):
            assert (a, b) == (4, "d")


def test_what_a_class_defines_itself_stays() -> None:
    seen = []
    for decorator in EITHER:

        @decorator(frozen=True)
        class Own:
            a: int

            def __init__(self) -> None:
                object.__setattr__(self, "a", 9)

            def __repr__(self) -> str:
                return "own"

            def __eq__(self, other: object) -> bool:
                return True

            def __hash__(self) -> int:
                return 4

            @cached_property
            def twice(self) -> int:
                return self.a * 2

        @decorator
        class Equal:
            a: int

            def __eq__(self, other: object) -> bool:
                return True

        class Plain(Own):  # no dataclass itself: other attributes can be set
            pass

        plain: Any = Plain()
        equal: Any = Equal
        plain.other = 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            plain.a = 1
        seen.append((repr(Own()), Own() == 1, hash(Own()), Own().twice, plain.other, Equal.__hash__, equal(1) == equal(2)))
    assert seen[0] == seen[1]


def test_mutable_defaults_are_refused_as_by_the_library() -> None:
    for decorator in EITHER:
        with pytest.raises(ValueError, match="mutable default <class 'list'> for field a is not allowed"):

            @decorator
            class _Wrong:
                a: list[int] = []  # noqa: RUF012


def test_threads_may_make_the_first_ones_together() -> None:
    for _ in range(20):
        _, three, _ = made(records.dataclass, frozen=True, slots=True)
        begin, seen = threading.Barrier(4), list[float]()

        def work(three: type[Any] = three, begin: threading.Barrier = begin, seen: list[float] = seen) -> None:
            begin.wait(30)
            seen.append(three(1, e=2.5).e)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [2.5] * 4


def test_the_first_call_has_the_message_of_every_call() -> None:
    told = []
    for _ in range(2):
        with pytest.raises(TypeError) as caught:
            Llama3Scaling(1.0, 2.0)  # type: ignore[call-arg]
        told.append(str(caught.value))
    assert told == ["Llama3Scaling.__init__() missing 2 required positional arguments: " + told[0].partition(": ")[2]] * 2
