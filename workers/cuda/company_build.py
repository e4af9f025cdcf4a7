"""The monokernel's build whose passes have a token of each of several requests, each in a seat. See docs/passes.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kog_dist.collectives.mailbox import place
from kog_dist.cuda.device_array import DeviceStream
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import np
from kog_dist.records import dataclass
from kog_dist.runtime.abi import MAX_STOP_IDS
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.build import build
from kog_dist.workers.cuda.kernel_abi import COMPANY_PARAMS, COMPANY_STATES_PARAMS, DECODE_STATE
from kog_dist.workers.cuda.kernel_boxes import COMPANY_SIZES
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.model_limits import untried_in_company
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REFUSAL = "several requests cannot decode together on GPUs here: "


def company_shape(shape: KernelShape, tokens: int) -> KernelShape:
    """What the build for passes of so many requests is compiled for. Raises ConfigError naming what it cannot run."""
    try:
        return replace(shape, tokens=tokens, company=True)
    except ConfigError as error:
        cause = str(error).removesuffix("; use passes of one token")
        raise ConfigError(f"{_REFUSAL}{cause}; use --parallel 1") from error


def obstacle_to_company(shape: KernelShape, tokens: int) -> str:
    """Why engines do not let so many requests share a pass, or nothing."""
    if what := untried_in_company(shape.spec, shape.num_ranks):
        return f"no GPU has run passes of several requests with {what} yet"
    try:
        company_shape(shape, tokens)
    except ConfigError as error:
        return str(error).removeprefix(_REFUSAL).removesuffix("; use --parallel 1")
    return ""


def company_sizes(shape: KernelShape, parallel: int) -> list[int]:
    """Of how many requests a rank has builds, where so many run at once; none where it cannot, and requests take turns."""
    if parallel == 1 or shape.checks_experts:
        return []
    return [size for size in COMPANY_SIZES if not obstacle_to_company(shape, size)]


def company_bytes(shape: KernelShape, tokens: int) -> int:
    """GPU memory of the build besides that of `Monokernel`, and what several ranks exchange for it and for drafts.

    Requests' KV caches, states and prompts are not among them.
    """
    company = company_shape(shape, tokens)
    first, end = shape.head.vocab_rows
    with_all, alone = (sum(box.num_words for box in place(one.words.boxes.specs(), one.num_ranks)) for one in (company, shape))
    return 8 * (company.words.num_words + with_all - alone) + 4 * tokens * (end - first) + DECODE_STATE.size_bytes


def company_headers(shape: KernelShape, tokens: int) -> dict[str, str]:
    """What the build is compiled with: `KernelShape` as generated headers."""
    return headers(company_shape(shape, tokens))


@dataclass(frozen=True, slots=True)
class CompanySeat:
    """A request among those of a launch. Pointers are addresses for the GPU of what is the request's alone.

    `state_ptr`: a `DECODE_STATE` in device memory, of which token, position, num_prompt, max_tokens and finish count; a launch
    goes on there, and leaves what it came to, in a build with hashes also the hash. `prompt_ptr`: uint32 (max_context) in device
    memory. `ring_ptr`: uint64 (max_context, 2) in pinned host memory: for each token of the answer id and finish, with `tag`.
    `host_ptr`: a `HOST_PAGE` in pinned host memory; the request ends when its `cancelled_tag` is `tag`. `kv_ptr`: a KV cache,
    `CacheShape.num_bytes` in device memory, that holds all positions in front of the state's. `nets_ptr`: what its delta nets
    keep, `DeltaShape.num_bytes` in device memory, behind just these positions; 0 in a model without.
    """

    state_ptr: int
    prompt_ptr: int
    ring_ptr: int
    host_ptr: int
    kv_ptr: int
    sampling: SamplingParams  # of which seed and temperature count: what else there is needs processors
    stop_ids: tuple[int, ...]
    tag: int  # not 0
    nets_ptr: int = 0


def company_params(seats: Sequence[CompanySeat | None]) -> bytes:
    """`COMPANY_PARAMS` of a launch; None is an empty seat. Raises ValueError for what no launch may have."""
    taken = [(number, seat) for number, seat in enumerate(seats) if seat is not None]
    if not taken:
        raise ValueError("a launch with company needs a request in one of its seats")
    for name in ("state_ptr", "kv_ptr", "ring_ptr", "nets_ptr"):
        pointers = [getattr(seat, name) for _, seat in taken if name != "nets_ptr" or seat.nets_ptr]
        if len(set(pointers)) < len(pointers):
            raise ValueError(f"two seats have the same {name}: a request has one seat, and memory of its own")
    params = np.zeros((), COMPANY_PARAMS.dtype)
    for number, seat in taken:
        if seat.tag == 0 or len(seat.stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"seat {number} has tag {seat.tag} (not 0) and {len(seat.stop_ids)} stop ids (at most {MAX_STOP_IDS})"
            )
        for name in ("state_ptr", "prompt_ptr", "ring_ptr", "host_ptr", "kv_ptr"):
            params[name][number] = getattr(seat, name)
        params["seed"][number], params["request_tag"][number] = seat.sampling.seed, seat.tag
        if seat.sampling.temperature > 0:
            inverse = np.float32(1.0) / np.float32(seat.sampling.temperature)
            params["inverse_temperature_bits"][number] = inverse.view(np.uint32)
        params["num_stop_ids"][number] = len(seat.stop_ids)
        params["stop_ids"][number * MAX_STOP_IDS :][: len(seat.stop_ids)] = seat.stop_ids
        params["taken"] |= 1 << number
    return params.tobytes()


def company_states_params(seats: Sequence[CompanySeat | None]) -> bytes:
    """`COMPANY_STATES_PARAMS` of a launch."""
    params = np.zeros((), COMPANY_STATES_PARAMS.dtype)
    params["state_ptr"][: len(seats)] = [0 if seat is None else seat.nets_ptr for seat in seats]
    return params.tobytes()


class CompanyBuild:
    """The kernel of a rank for passes of `tokens` requests, with its words, logits and state of passes.

    With several ranks the heap holds the boxes of `company_shape`, first and in that order: those of one token and of drafts, and
    those of company. Raises ConfigError, CompileError or LaunchError.
    """

    def __init__(self, shape: KernelShape, kernel_name: str, tokens: int) -> None:
        import cupy

        from kog_dist.cuda.driver import Kernel

        self.shape = company_shape(shape, tokens)
        self.kernel = Kernel(build(headers(self.shape)).path, kernel_name, SHARED_BYTES)
        first, end = shape.head.vocab_rows
        self.words = cupy.zeros(self.shape.words.num_words, cupy.uint64)
        self.logits = cupy.zeros((tokens, end - first), cupy.float32)  # of each seat, of the last pass that had logits
        self._state = cupy.zeros(DECODE_STATE.size_bytes, cupy.uint8)

    def params(self, of_launch: NDArray[np.void], peers: bytes, seats: Sequence[CompanySeat | None], nets: bytes = b"") -> bytes:
        """The raw parameters of a launch, for whoever queues it: `num_ctas` thread blocks of `num_threads`.

        `of_launch`: `DECODE_PARAMS` as another build has them, of which weights, record, host page, limit and `num_steps` count;
        it is changed. `peers`: `PEERS`. `nets`: `DELTA_PARAMS` of a model with delta nets, in which the state does not count.

        A launch makes at most `num_steps` passes, and ends behind the one in which the last request ends; one whose requests have
        all ended does nothing. Raises ValueError as `company_params` does.
        """
        if len(seats) > self.shape.tokens:
            raise ValueError(f"{len(seats)} seats in passes of {self.shape.tokens} tokens")
        of_launch["words_ptr"], of_launch["logits_ptr"] = self.words.data.ptr, self.logits.data.ptr
        of_launch["state_ptr"] = self._state.data.ptr
        for of_one_request in ("kv_ptr", "prompt_ptr", "ring_ptr", "drafts_ptr"):
            of_launch[of_one_request] = 0
        of_nets = nets + company_states_params(seats) if nets else b""
        return of_launch.tobytes() + peers + company_params(seats) + of_nets

    def state(self, stream: DeviceStream | None) -> np.void:
        """What the last launch left, as a `DECODE_STATE` record: epoch, num_kept (seats that went on in the last pass) and
        abort_mirror; 1: a wait ran out of time, or the host asked for it. Waits for the launches on `stream`."""
        left: np.void = np.frombuffer(self._state.get(stream=stream).tobytes(), DECODE_STATE.dtype)[0]
        return left
