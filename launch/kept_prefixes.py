"""How much memory ranks get for kept beginnings of sequences: the block pool of `workers/coordinator/kept_blocks.py`."""

from __future__ import annotations

from kog_dist.config import LaunchConfig, parse_gib
from kog_dist.decode.cpu.pool_sizes import bytes_of_states
from kog_dist.errors import ConfigError
from kog_dist.runtime import memfd

_CPU_BYTES = 64 << 20  # of a rank, unless told otherwise
# And of a model with a state that every token changes as much as has room for so many copies of it: more for each request that
# runs beside others, of which each makes its own, as long as they take no more than a share of what is free.
_CPU_STATES, _STATES_OF_ANOTHER = 16, 11
_MOST_GPU_BYTES, _SHARE_OF_FREE = 16 << 30, 4  # of a GPU, and of what is free there beside the model
_HOST_BYTES = 4 << 30  # of all ranks of a host together, page-locked
_SHARE_OF_HOST = 8  # of what is free there


def kept_on_cpu(settings: LaunchConfig, num_ranks: int, of_state: int = 0, parallel: int = 1) -> int:
    """Bytes of each CPU rank, which has `of_state` bytes of a state that every token changes. Raises ConfigError for more than is
    free, for less than one copy of a state, and for memory behind that of GPUs.

    `parallel`: requests that run together.
    """
    asked = parse_gib(settings.prefix_cache)
    if parse_gib(settings.prefix_host):
        raise ConfigError(
            f"prefix_host {settings.prefix_host} is memory behind that of GPUs, and these are CPU ranks, which have prefix_cache "
            "alone; leave it out"
        )
    if asked is None:
        wanted = bytes_of_states(_CPU_STATES + _STATES_OF_ANOTHER * (parallel - 1), of_state)
        least, share = bytes_of_states(_CPU_STATES, of_state), memfd.available_bytes() // (_SHARE_OF_HOST * num_ranks)
        return max(_CPU_BYTES, least, min(wanted, share))
    refuse_less_than_a_state(settings, of_state)
    if asked * num_ranks > (free := memfd.available_bytes()):
        raise ConfigError(
            f"prefix_cache {settings.prefix_cache} does not fit: each of {num_ranks} CPU ranks would take as much, and "
            f"{free / 2**30:.1f} GiB of memory are free here; give less, off, or auto"
        )
    return asked


def refuse_less_than_a_state(settings: LaunchConfig, of_state: int) -> None:
    """Raise ConfigError if a rank is to keep less than one copy of a state of so many bytes, on whatever machine."""
    asked = parse_gib(settings.prefix_cache) or 0
    if 0 < asked < (least := bytes_of_states(1, of_state)):
        enough = -(-least * 10**6 // 2**30) / 10**6  # rounded up
        raise ConfigError(
            f"prefix_cache {settings.prefix_cache} has no room for a copy of this model's state, without which nothing that is "
            f"kept can be used; give {enough:.6f} or more, off, or auto"
        )


def least_kept(settings: LaunchConfig, of_context: int) -> int:
    """Bytes of a GPU that must stay free beside what runs several requests, if nobody has asked for these: as many as are asked
    for, else those of a context, where that is not more than a GPU has in any case.
    """
    asked = parse_gib(settings.prefix_cache)
    return min(_MOST_GPU_BYTES, of_context) if asked is None else asked


def kept_on_gpus(
    settings: LaunchConfig, spare_bytes: int, num_ranks: int, *, has_rings: bool = False, least: int = 0, of_state: int = 0
) -> tuple[int, int]:
    """Bytes of each rank on its GPU, where `spare_bytes` are free beside the model, and in the host's memory.

    `least`: on the GPU, if nobody asks for a number. `of_state`: of a state that every token changes.

    Raises ConfigError for more than there is, for less than one copy of a state, and for any that is asked for where windowed
    layers keep a ring (`has_rings`).
    """
    if has_rings:
        for name in ("prefix_cache", "prefix_host"):
            if parse_gib(text := getattr(settings, name)):
                raise ConfigError(
                    f"{name} {text} cannot be had where windowed layers keep a ring of positions, which forgets; kv_windows "
                    "whole says what they would need, or leave it out"
                )
        return 0, 0
    asked, asked_of_host = parse_gib(settings.prefix_cache), parse_gib(settings.prefix_host)
    if asked is None:
        asked = min(_MOST_GPU_BYTES, max(least, spare_bytes // _SHARE_OF_FREE))
        if asked < bytes_of_states(1, of_state):
            asked = 0
    elif asked > spare_bytes:
        raise ConfigError(
            f"prefix_cache {settings.prefix_cache} does not fit: {max(spare_bytes, 0) / 2**30:.1f} GiB of a GPU are free beside "
            "the model; give less, off, or auto"
        )
    refuse_less_than_a_state(settings, of_state)
    if asked_of_host is None:
        asked_of_host = min(_HOST_BYTES, memfd.available_bytes() // _SHARE_OF_HOST)
    return max(asked, 0), asked_of_host // num_ranks if asked > 0 else 0
