"""What `--gpus` means: N, all, or a list of indices and UUIDs, among the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""

from __future__ import annotations

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.hardware.gpus import Gpu, Inventory
from kog_dist.hardware.visible import VARIABLE, Visible
from kog_dist.records import dataclass

_UUID, _MIG = "GPU-", "MIG-"
_CPU = "use --device cpu for CPU ranks"
_OTHERS = f"kog-doctor lists those that are here; or {_CPU}"
_MOST_DIGITS = 6  # of an index or a count


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """A parsed `--gpus`: the first `count`, or those with these `names` (index or start of a UUID); neither: all."""

    shown: str  # how the user asked, for messages
    count: int | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> GpuRequest:
        """`2` is the first two, `0,2` or `2,` names them. Raises ConfigError for what is none of these forms."""
        words, shown = text.strip(), f"--gpus {text}"
        if words == "all":
            return cls(shown)
        if _is_index(words):
            if int(words) < 1:
                raise ConfigError(f"{shown}: at least one; {_CPU}")
            return cls(shown, count=int(words))
        names = tuple(part.strip() for part in words.split(",") if part.strip())
        if any(name.startswith(_MIG) for name in names):
            raise ConfigError(f"{shown}: the kernel needs whole GPUs, not instances of a split one (MIG)")
        if not names or not all(_is_index(name) or (name.startswith(_UUID) and len(name) > len(_UUID)) for name in names):
            raise ConfigError(f"--gpus must be a count, all, or a list of indices or UUIDs such as 0,2 or GPU-5f2a; got {text!r}")
        if len(set(names)) < len(names):
            raise ConfigError(f"{shown} names a GPU twice")
        return cls(shown, names=names)

    @property
    def num_gpus(self) -> int | None:
        """How many are asked for, None for all there are."""
        return self.count or len(self.names) or None


def select_gpus(request: GpuRequest, visible: Visible, inventory: Inventory) -> tuple[Gpu, ...]:
    """The GPUs that are asked for, in the order of the list. Indices count the visible ones, as in every CUDA program.

    Raises LaunchError that says what is there instead, ConfigError for a list that names a GPU twice.
    """
    if request.names:
        return _named(request, visible, inventory)
    whole = tuple(gpu for gpu in visible.gpus if not gpu.has_mig)
    if len(whole) < (request.count or 1):
        split = len(visible.gpus) - len(whole)
        mig = f" ({split} split into MIG instances, which are left alone)" if split else ""
        raise LaunchError(f"{request.shown}: {found(visible, inventory)}{mig}; {_CPU}")
    return whole[: request.count]


def _named(request: GpuRequest, visible: Visible, inventory: Inventory) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for name in request.names:
        gpu = _by_index(name, request, visible, inventory) if _is_index(name) else _by_uuid(name, request, visible, inventory)
        if gpu.has_mig:
            raise LaunchError(f"{request.shown}: {gpu} is split into MIG instances, and the kernel needs a whole GPU")
        if gpu in chosen:
            raise ConfigError(f"{request.shown} names {gpu} twice")
        chosen.append(gpu)
    return tuple(chosen)


def _by_index(name: str, request: GpuRequest, visible: Visible, inventory: Inventory) -> Gpu:
    if int(name) >= len(visible.gpus):
        raise LaunchError(f"{request.shown}: there is no GPU {name}: {found(visible, inventory)}; {_OTHERS}")
    return visible.gpus[int(name)]


def _by_uuid(name: str, request: GpuRequest, visible: Visible, inventory: Inventory) -> Gpu:
    matches = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(name.lower())]
    if not matches:
        raise LaunchError(f"{request.shown}: no GPU has a UUID that starts with {name}: {found(visible, inventory)}; {_OTHERS}")
    if len(matches) > 1:
        raise LaunchError(f"{request.shown}: {name} fits {len(matches)} GPUs; give more of the UUID")
    if matches[0] not in visible.gpus:
        raise LaunchError(f"{request.shown}: {matches[0]} is hidden: {visible.why or VARIABLE}")
    return matches[0]


def found(visible: Visible, inventory: Inventory) -> str:
    """How many GPUs a CUDA program would see, and why not more."""
    if not inventory.gpus:
        return inventory.findings[0] if inventory.findings else "no GPU was found"
    count = len(visible.gpus)
    shown = f"{count or 'no'} GPU{'s' if count != 1 else ''} {'are' if count != 1 else 'is'} visible"
    return f"{shown} ({visible.why})" if visible.why else shown


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS
