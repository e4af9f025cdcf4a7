"""NumPy for what is imported by processes that seldom compute: it is not imported before something of it is used.

Its import takes a tenth of a second of a core, which launchers, coordinators, gateways and clients would spend at every start.
`NDArray` and `DTypeLike` are for annotations; an alias of one names what is in it as text: `NDArray["np.float32"]`. `Array` is an
array whose values may be of several types: whoever takes it says which.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    Array: TypeAlias = NDArray[Any]
else:

    class _LateModule:
        """Stands for a module; keeps what was asked of it, so that it is asked once."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            setattr(self, name, found)
            return found

    class NDArray:
        """Says nothing but that it is one."""

        def __class_getitem__(cls, item: Any) -> type[NDArray]:
            return cls

    Array, DTypeLike = NDArray, Any
    np = _LateModule("numpy")

__all__ = ["Array", "DTypeLike", "NDArray", "np"]
