"""What is used of cupy's arrays and streams. cupy has no types, and is imported only where there is a GPU."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray


class DevicePointer(Protocol):
    """Where something begins."""

    @property
    def ptr(self) -> int:
        """The address on the GPU."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the GPU has come to it."""


class DeviceStream(DevicePointer, Protocol):
    """A CUDA stream, the current one of this thread while it is entered; `ptr` is what the driver takes for it."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def record(self) -> DeviceEvent:
        """An event behind all that is queued."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""


class DeviceValues(Protocol):
    """Values on the GPU."""

    def get(self, stream: DeviceStream | None = None) -> NDArray[Any]:
        """A copy on the host, behind what is queued on the stream; None: on the current one."""


class DeviceArray(DeviceValues, Protocol):
    """An array on the GPU (`cupy.ndarray`). What is computed with it is queued on the current stream."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def dtype(self) -> Any:
        """NumPy's type of its values."""

    @property
    def size(self) -> int:
        """How many values it has."""

    @property
    def nbytes(self) -> int:
        """How many bytes these take."""

    @property
    def data(self) -> DevicePointer:
        """Its memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> DeviceArray: ...

    def __setitem__(self, key: Any, value: object, /) -> None: ...

    def set(self, values: NDArray[Any], /) -> None:
        """Copy values of the host to it."""

    def fill(self, value: float, /) -> None:
        """Give all of it one value."""

    def copy(self) -> DeviceArray:
        """The same in memory of its own."""

    def view(self, dtype: DTypeLike, /) -> DeviceArray:
        """The same memory as values of another type."""

    def astype(self, dtype: DTypeLike, /) -> DeviceArray:
        """A copy as values of another type."""

    def reshape(self, *shape: int) -> DeviceArray:
        """The same values in other dimensions."""
