"""`dataclass` as in the standard library, for the classes of which each process of an engine makes a hundred before it can begin.

The library compiles up to six methods of a class when it is defined: that was a third of the time in which a launcher imports
what it needs. Here `__init__` is compiled when a class is called for the first time, and the other methods need no compiler.
`fields`, `replace`, `asdict` and the others of the library take these classes as their own. One may inherit from another, but not
from a class of the library. `InitVar`, `field(init=False)` and options that are not listed here are for the library's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from typing import TYPE_CHECKING, Any

_NOT_GIVEN = object()  # for a parameter whose value a function makes


def _dataclass(cls: Any = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    """The decorator, or with options what makes one. Raises TypeError as the library does."""

    def decorated(cls: type[Any]) -> type[Any]:
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
        _add_methods(made, frozen, slots, eq)
        return made

    return decorated if cls is None else decorated(cls)


def _add_methods(cls: type[Any], frozen: bool, slots: bool, eq: bool) -> None:
    """Those that the class does not define itself."""
    own, fields = vars(cls), dataclasses.fields(cls)
    methods: dict[str, object] = {"__init__": _late_init(cls, frozen), "__repr__": _repr}
    if eq:
        compared = _values_of([field.name for field in fields if field.compare])
        if own.get("__hash__") is None and ("__hash__" not in own or "__eq__" in own):
            cls.__hash__ = _hash_of(compared) if frozen else None  # type: ignore[assignment]
        methods["__eq__"] = _eq_of(compared)
    if frozen:
        names = frozenset(field.name for field in fields)
        methods |= {"__setattr__": _no_setattr(cls, names), "__delattr__": _no_delattr(cls, names)}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)


def _late_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """An `__init__` that writes the real one, which takes its place."""

    def first(self: object, *arguments: object, **named: object) -> None:
        cls.__init__ = init = _written_init(cls, frozen)
        init(self, *arguments, **named)

    return first


def _written_init(cls: type[Any], frozen: bool) -> Callable[..., None]:
    known: dict[str, Any] = {"_set": object.__setattr__, "_not_given": _NOT_GIVEN}
    positional, named, body = ["self"], list[str](), list[str]()
    for field in dataclasses.fields(cls):
        name = value = parameter = field.name
        if field.default is not MISSING:
            known[f"_of_{name}"], parameter = field.default, f"{name}=_of_{name}"
        elif field.default_factory is not MISSING:
            known[f"_of_{name}"], parameter = field.default_factory, f"{name}=_not_given"
            value = f"_of_{name}() if {name} is _not_given else {name}"
        (named if field.kw_only else positional).append(parameter)
        body.append(f" _set(self, {name!r}, {value})\n" if frozen else f" self.{name} = {value}\n")
    if hasattr(cls, "__post_init__"):
        body.append(" self.__post_init__()\n")
    parameters = ", ".join([*positional, "*", *named] if named else positional)
    exec(f"def __init__({parameters}):\n{''.join(body) or ' pass'}", known)
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _values_of(names: list[str]) -> Callable[[object], object]:
    """A function that gives the tuple of these attributes."""
    if not names:
        return lambda record: ()
    values = attrgetter(*names)
    return values if len(names) > 1 else lambda record: (values(record),)


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq_of(values: Callable[[object], object]) -> Callable[[object, object], object]:
    def equal(self: object, other: object) -> object:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return equal


def _hash_of(values: Callable[[object], object]) -> Callable[[object], int]:
    def hash_of(self: object) -> int:
        return hash(values(self))

    return hash_of


def _no_setattr(cls: Any, names: frozenset[str]) -> Callable[[object, str, object], None]:
    def set_attribute(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    return set_attribute


def _no_delattr(cls: Any, names: frozenset[str]) -> Callable[[object, str], None]:
    def delete(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return delete


def _state(self: Any) -> list[Any]:
    """For copies and pickles of what is frozen and has slots."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass
