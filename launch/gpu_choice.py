"""Whether a run uses GPUs, and which: `--device`, `--gpus`, what is there, and what the kernel can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, KogError, LaunchError, PlanError, install
from kog_dist.hardware.gpus import Gpu, Inventory, read_inventory
from kog_dist.hardware.selection import GpuRequest, select_gpus
from kog_dist.hardware.visible import Visible, visible_gpus
from kog_dist.launch.gpu_leases import use_of
from kog_dist.launch.kept_prefixes import least_kept
from kog_dist.records import dataclass
from kog_dist.speculation import Speculation

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.cuda.kernel_shape import KernelShape

KERNEL_COMPUTE = (9, 0)  # compute capability that kog_dist/cuda/build.py compiles for
MOST_GPUS_TOGETHER = 2  # that run several requests at once unasked: on more it has not run
TOGETHER = (4, 2)  # requests at once where nobody asks for a number, the best one first: as many as memory allows
# Of a decode slot beside the first, which is in BESIDES_BYTES: for each position a token of the prompt, and with drafts two more;
# for each row of the LM head what processors keep.
_SLOT_BYTES, _DRAFTED_BYTES, _ROW_BYTES = 4, 8, 12
PREFILLED_GPUS = 4  # with `--prefill auto` at most that many take prompts in blocks: with more it has not run
LEAST_CONTEXT, _CONTEXT_STEP = 4096, 1024  # tokens of a context that is shortened to what fits
# The CUDA context with its kernels, and what loading takes for a while; measured with one rank. tests/gpu/test_engine_ranks.py
# compares what several take with what is counted.
BESIDES_BYTES = 1 << 30
_PLANNED_BYTES = 139 << 30  # that are free on an H200


@dataclass(frozen=True)
class GpuChoice:
    """GPUs of an engine by rank. `gpus` is empty where they are not here; `obstacles`: why they cannot be used here and now."""

    count: int
    kv_dtype: str
    inventory: Inventory
    gpus: tuple[Gpu, ...] = ()
    obstacles: tuple[KogError, ...] = ()
    prefill: str = "off"  # as its ranks are told: on, off, or auto, which goes on without it where it cannot start
    note: str = ""  # why an engine that would use prefill does not, or has a shorter context
    context: int = 0  # tokens that fit, where those of the model do not; else 0
    spare_bytes: int = 0  # that are free on each GPU beside the model
    whole_windows: bool = False  # whether windowed layers keep all positions
    drafts: bool = False  # whether requests may have drafts
    parallel: int = 1  # requests that run together,
    num_caches: int = 1  # and KV caches
    kept_bytes: int = 0  # least for kept prefixes, of what is spare
    state_bytes: int = 0  # of a KV cache's state that every token changes


def choose_gpus(
    settings: LaunchConfig, checkpoint: Checkpoint, environ: Mapping[str, str], inventory: Inventory | None = None
) -> GpuChoice | None:
    """GPUs of the run, None for CPU ranks. Without `inventory` the machine is asked, where it matters.

    Raises ConfigError or LaunchError for a request that makes no sense, or no number of ranks, wherever it is started.
    """
    windows = settings.kv_windows
    if windows != "auto" and not checkpoint.spec.window_layers:
        raise ConfigError(f"kv_windows {windows} is for models with windowed layers, and this one has none; leave it out")
    found = None if settings.device == "cpu" else _choose(settings, checkpoint, environ, inventory)
    if found is None and settings.device != "cpu" and settings.speculate == Speculation.LOOKUP:
        without = _choose(replace(settings, speculate=Speculation.OFF), checkpoint, environ, inventory)
        if without is not None:  # drafts alone stand against GPUs: that is to be said
            gpu_rank_bytes(checkpoint, 0, without.count, without.kv_dtype, drafts=True)
    if found is None and settings.prefill == "on":
        raise ConfigError("--prefill on is for GPUs, and the model would run on CPU ranks here; leave it out, or use --gpus")
    if found is not None and settings.check_experts and settings.prefill == "on":
        raise ConfigError("--prefill on contradicts --check-experts, which compares what the decoder chooses; leave one out")
    if found is None and windows == "ring":
        raise ConfigError("kv_windows ring is for GPUs, and CPU ranks keep all positions; leave it out, or use --gpus")
    if found is not None and windows == "whole" and not found.whole_windows:
        raise ConfigError(
            f"kv_windows whole cannot be had: windows of {checkpoint.spec.sliding_window} positions fill their rings of batches; "
            "leave it out"
        )
    return found


def _choose(
    settings: LaunchConfig, checkpoint: Checkpoint, environ: Mapping[str, str], inventory: Inventory | None
) -> GpuChoice | None:
    asked = settings.device == "cuda" or settings.gpus is not None
    inventory = read_inventory() if inventory is None else inventory
    visible = visible_gpus(inventory.gpus, environ)
    kv_dtype = checkpoint.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    if not asked and inventory.driver_hangs:  # CPU ranks would be a thousand times slower, and nobody would know why
        raise LaunchError(f"{inventory.findings[0]}; --device cpu uses CPU ranks")
    if not asked:
        return _choose_unasked(settings, checkpoint, visible, inventory, kv_dtype)
    request = GpuRequest("--device cuda", settings.ranks or 1) if settings.gpus is None else GpuRequest.parse(settings.gpus)
    gpus, obstacles = _try_select(request, visible, inventory)
    count = len(gpus) or request.num_gpus
    if count is None:
        raise obstacles[0]  # nobody can say how many "all" are
    if settings.ranks not in (0, count):
        raise ConfigError(f"--ranks {settings.ranks} contradicts {count} GPU{'s' if count > 1 else ''}: a GPU has one rank")
    needs = _needs(settings, checkpoint, count, kv_dtype)
    free_bytes = min((gpu.free_bytes for gpu in gpus), default=0)
    ways = itertools.chain(needs, _shorter(settings, checkpoint, count, kv_dtype, free_bytes))
    fits = (need for need in ways if all(_has_room(gpu, need) for gpu in gpus))
    need = next(fits, needs[-1]) if gpus else _planned(needs)
    _check_words(checkpoint, count, kv_dtype, need)
    return _choice(count, kv_dtype, inventory, gpus, need, (*obstacles, *_obstacles(inventory, gpus, count, need)))


@dataclass(frozen=True)
class _Need:
    """What a rank takes in one way to run it. `obstacle`: why it cannot be run in this way on any GPU."""

    bytes_by_use: Mapping[str, int]
    prefill: str
    note: str = ""
    obstacle: str = ""
    context: int = 0  # of tokens, if shorter than the model's
    whole_windows: bool = False  # whether windowed layers keep all positions
    drafts: bool = False  # whether requests may have drafts
    together: tuple[int, int] = (1, 1)  # requests at once, and KV caches
    kept_bytes: int = 0  # what must stay free besides, for kept prefixes

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.bytes_by_use.values()) + BESIDES_BYTES

    @property
    def free_bytes(self) -> int:
        """What must be free."""
        return self.num_bytes + self.kept_bytes

    @property
    def of_prefill(self) -> int:
        """What prefill takes of it."""
        return sum(count for use, count in self.bytes_by_use.items() if use.startswith("prefill"))


def _needs(settings: LaunchConfig, checkpoint: Checkpoint, count: int, kv_dtype: str) -> list[_Need]:
    """The ways in which ranks may run, the best one first.

    With `auto` windowed layers keep a ring of positions where all of them do not fit, and ranks do without prefill. Where nobody
    asks for a number of requests at once, one is better than to do without these.
    """
    from kog_dist.workers.cuda.coded_source import coding_of
    from kog_dist.workers.prefill.memory import obstacle_to_prefill

    def needs(prefill: str, note: str = "", obstacle: str = "") -> list[_Need]:
        shapes = _window_shapes(settings, checkpoint, count, kv_dtype)
        found = list[_Need]()
        for number, shape in enumerate(shapes):
            drafts = _drafts(settings, shape)
            has_prefill = prefill != "off" and not obstacle
            notes = "; ".join(filter(None, (note, _ring_note(*shapes) if number else "")))
            for together in _together(settings, shape, count):
                uses = _bytes_by_use(checkpoint, shape, prefill=has_prefill, drafts=drafts, together=together)
                is_asked = settings.parallel or settings.kv_caches or together == (1, 1)
                kept = 0 if is_asked or shape.cache.ring_positions else least_kept(settings, shape.cache.num_bytes)
                found.append(_Need(uses, prefill, notes, obstacle, 0, shape.whole_windows, drafts, together, kept))
        return found

    if settings.prefill == "off" or (settings.prefill == "auto" and count > PREFILLED_GPUS):
        return needs("off")
    if settings.check_experts:
        return needs("off", note="prompts go token by token: --check-experts compares what is chosen for each")
    asks_coding = checkpoint.spec.experts is not None or checkpoint.spec.mixed_layers
    obstacle = obstacle_to_prefill(checkpoint.spec, coding_of(checkpoint) if asks_coding else None, kv_dtype)
    if settings.prefill == "on":
        return needs("on", obstacle=obstacle)
    if obstacle:
        return needs("off", note=f"prompts go token by token: {obstacle}")
    with_it = needs("auto")
    takes = _gib(with_it[-1].of_prefill)
    return [*with_it, *needs("off", note=f"prompts go token by token: prefill takes {takes}, which do not fit")]


def _window_shapes(settings: LaunchConfig, checkpoint: Checkpoint, count: int, kv_dtype: str) -> list[KernelShape]:
    """Rank 0's kernel in the ways in which windowed layers may keep positions, the best one first.

    With `auto` those of Laneformers keep a ring: with all positions no GPU has run them.
    """
    ring, spec = gpu_rank_shape(checkpoint, 0, count, kv_dtype), checkpoint.spec
    if not spec.window_layers or settings.kv_windows == "ring" or not ring.cache.can_be_whole:
        return [ring]
    whole = replace(ring, whole_windows=True)
    if settings.kv_windows == "whole":
        return [whole]
    return [whole, ring] if spec.has_one_stream else [ring]


def _ring_note(whole: KernelShape, ring: KernelShape) -> str:
    return (
        f"no prefixes are kept, since windowed layers keep a ring of {ring.cache.ring_positions} positions: all of them take "
        f"{_gib(whole.cache.num_bytes - ring.cache.num_bytes)} more, which do not fit; a shorter --context takes less"
    )


def _shorter(settings: LaunchConfig, checkpoint: Checkpoint, count: int, kv_dtype: str, free_bytes: int) -> Iterator[_Need]:
    """The same ways, the best one first, with the longest context that so much free memory has room for.

    None where that is less than LEAST_CONTEXT, or where the user has asked for a context. Windowed layers keep a ring, unless the
    user has asked for all positions, and there is one request at a time, unless the user has asked for more: a longer context is
    worth more.
    """
    whole = checkpoint.spec.max_context
    if not settings.parallel and not settings.kv_caches:
        settings = replace(settings, parallel=1)
    if settings.kv_windows == "auto":
        settings = replace(settings, kv_windows="ring")

    def ways(context: int) -> list[_Need]:
        shorter = replace(checkpoint, spec=checkpoint.spec.with_context(context))
        return _needs(settings, shorter, count, kv_dtype)

    if settings.context or whole <= LEAST_CONTEXT:
        return
    for number, way in enumerate(ways(LEAST_CONTEXT)):
        if way.obstacle or way.num_bytes > free_bytes:
            continue
        fits, fails = LEAST_CONTEXT // _CONTEXT_STEP, -(-whole // _CONTEXT_STEP)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if ways(middle * _CONTEXT_STEP)[number].num_bytes <= free_bytes else (fits, middle)
        context = fits * _CONTEXT_STEP
        note = (
            f"context of {context} tokens, of the model's {whole}: more does not fit into the {_gib(free_bytes)} that are free "
            "on a GPU; --context asks for another"
        )
        need = ways(context)[number]
        yield replace(need, note="; ".join(filter(None, (note, need.note))), context=context)


def _choice(
    count: int, kv_dtype: str, inventory: Inventory, gpus: tuple[Gpu, ...], need: _Need, obstacles: tuple[KogError, ...] = ()
) -> GpuChoice:
    spare_bytes = min((gpu.free_bytes for gpu in gpus), default=0) - need.num_bytes if gpus else 0
    return GpuChoice(
        count, kv_dtype, inventory, gpus, obstacles, need.prefill, need.note, need.context, spare_bytes, need.whole_windows,
        need.drafts, *need.together, need.kept_bytes, need.bytes_by_use.get("states", 0) // need.together[1],
    )  # fmt: skip


def _drafts(settings: LaunchConfig, shape: KernelShape) -> bool:
    """Whether requests may have drafts: if asked for, or where `auto` has them."""
    from kog_dist.workers.cuda.draft_builds import why_unasked_without

    return settings.speculate == Speculation.LOOKUP or (settings.speculate == Speculation.AUTO and not why_unasked_without(shape))


def gpu_rank_bytes(
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    kv_dtype: str,
    *,
    prefill: bool = False,
    whole_windows: bool = False,
    drafts: bool = False,
    parallel: int = 1,
    num_caches: int = 1,
) -> dict[str, int]:
    """GPU memory of a rank by use; "prefill" begins what prefill takes, and "experts" are those of all layers.

    `parallel`: requests that run together, with `num_caches` KV caches.

    Raises ConfigError naming what the kernel cannot run, or which rank counts are possible.
    """
    shape = gpu_rank_shape(checkpoint, rank, world_size, kv_dtype, whole_windows=whole_windows)
    return _bytes_by_use(checkpoint, shape, prefill=prefill, drafts=drafts, together=(parallel, num_caches))


def gpu_rank_shape(
    checkpoint: Checkpoint, rank: int, world_size: int, kv_dtype: str, *, whole_windows: bool = False
) -> KernelShape:
    """A rank's kernel. Raises ConfigError like `gpu_rank_bytes`."""
    from kog_dist.workers.cuda.coded_source import codings_of
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.model_limits import refuse_untried

    lanes, codings = checkpoint.spec.lanes_of_rank(rank, world_size), codings_of(checkpoint)
    refuse_untried(checkpoint.spec, codings["coding"])
    return KernelShape(
        checkpoint.spec,
        lanes,
        weight_dtype=checkpoint.dtype,
        kv_dtype=kv_dtype,
        num_ranks=world_size,
        whole_windows=whole_windows,
        **codings,
    )


def _together(settings: LaunchConfig, shape: KernelShape, count: int) -> Sequence[tuple[int, int]]:
    """Requests that run together on so many GPUs, and KV caches: what is asked for, or what there may be, the best one first.

    Raises ConfigError for what cannot be had.
    """
    from kog_dist.workers.cuda.company_build import obstacle_to_company

    if settings.parallel:
        return [asked_together(settings)]
    has_company = count <= MOST_GPUS_TOGETHER and not settings.check_experts and not obstacle_to_company(shape, TOGETHER[-1])
    several = [parallel for parallel in TOGETHER if has_company and parallel <= (settings.kv_caches or parallel)]
    if settings.kv_caches:
        return [asked_together(replace(settings, parallel=parallel)) for parallel in (*several, 1)]
    return [*((parallel, parallel) for parallel in several), (1, 1)]


def asked_together(settings: LaunchConfig) -> tuple[int, int]:
    """Requests that run together, and KV caches, where either is asked for. Raises ConfigError for what cannot be had."""
    parallel, num_caches = settings.parallel or 1, settings.kv_caches or settings.parallel or 1
    if num_caches < parallel:
        raise ConfigError(
            f"parallel {parallel} needs a KV cache for each request, and kv_caches is {num_caches}; ask for {parallel}"
        )
    if parallel > 1 and settings.check_experts:
        raise ConfigError(f"parallel {parallel} contradicts --check-experts, which looks at one request; leave one out")
    return parallel, num_caches


def _bytes_by_use(
    checkpoint: Checkpoint, shape: KernelShape, *, prefill: bool, drafts: bool, together: tuple[int, int]
) -> dict[str, int]:
    """Raises ConfigError if drafts are asked for, and the kernel has no passes of several tokens of such a model."""
    from kog_dist.collectives.mailbox import place
    from kog_dist.workers.cuda.company_build import company_bytes, company_sizes
    from kog_dist.workers.cuda.draft_builds import draft_bytes
    from kog_dist.workers.prefill.memory import prefill_bytes

    spec, (parallel, num_caches) = checkpoint.spec, together
    norms = spec.hidden_size * (2 * spec.num_layers * (1 if spec.shared_norm_scale else shape.num_lanes) + shape.head.norm_lanes)
    rope, attending = 4 * spec.max_context * spec.rotary_dim, len(shape.cache.layers)
    vectors = attending * shape.num_lanes * spec.lane_qkv_rows if spec.qkv_bias else 0
    vectors += attending * 2 * spec.head_dim if spec.qk_norm else 0
    vectors += 0 if shape.delta is None else shape.delta.vector_values
    experts = {} if shape.experts is None else {"experts": shape.experts.num_bytes}
    uses = {
        "tape": 2 * shape.tape.weight_words,
        **experts,
        "tables": 2 * (spec.vocab_size * spec.hidden_size + norms + vectors) + rope,
        "cache": num_caches * shape.cache.num_bytes,
        "words": 8 * (shape.words.num_words + sum(box.num_words for box in place(shape.words.boxes.specs(), shape.num_ranks))),
    }
    if shape.delta is not None:
        uses["states"] = num_caches * shape.delta.num_bytes
    if drafts:
        uses["drafts"] = draft_bytes(shape)
    if parallel > 1:
        first, end = shape.head.vocab_rows
        of_slot = spec.max_context * (_SLOT_BYTES + _DRAFTED_BYTES * drafts) + _ROW_BYTES * (end - first)
        builds = (company_bytes(shape, size) for size in company_sizes(shape, parallel))
        uses["slots"] = (parallel - 1) * of_slot + sum(builds)
    return uses | (prefill_bytes(shape) if prefill else {})


def _try_select(request: GpuRequest, visible: Visible, inventory: Inventory) -> tuple[tuple[Gpu, ...], tuple[KogError, ...]]:
    try:
        return select_gpus(request, visible, inventory), ()
    except LaunchError as error:
        return (), (error,)


def _obstacles(inventory: Inventory, gpus: tuple[Gpu, ...], count: int, need: _Need) -> Iterator[KogError]:
    """Why this many GPUs, and these ones, cannot run the model now."""
    from kog_dist.collectives.cuda_abi import MAX_RANKS

    if need.obstacle:
        yield LaunchError(f"--prefill on cannot be had: {need.obstacle}; use --prefill off, or auto")
    for gpu in gpus:
        reason = _unfit(gpu, need)
        if reason:
            yield LaunchError(f"{gpu} {reason}")
    if between := inventory.obstacle_between(gpus):
        yield LaunchError(f"{between}; choose others with --gpus, or look at nvidia-smi topo -p2p rw")
    if count > MAX_RANKS:
        yield LaunchError(f"an engine runs on at most {MAX_RANKS} GPUs, not on {count}; use --gpus {MAX_RANKS}, or --device cpu")
    if find_spec("cupy") is None:
        yield LaunchError(f"GPUs need the package cupy-cuda13x: {install('cuda')}; or use --device cpu")


def _has_room(gpu: Gpu, need: _Need) -> bool:
    return gpu.free_bytes >= need.free_bytes


def _planned(needs: Sequence[_Need]) -> _Need:
    """On GPUs that are not here: in the best way, with as many requests at once as an H200 has memory for."""
    best = [need for need in needs if (need.prefill, need.whole_windows) == (needs[0].prefill, needs[0].whole_windows)]
    return next((need for need in best if need.free_bytes <= _PLANNED_BYTES), best[-1])


def _check_words(checkpoint: Checkpoint, count: int, kv_dtype: str, need: _Need) -> None:
    """Raise PlanError if words of ranks of this kind could be lost: each of them would refuse to start."""
    from kog_dist.workers.cuda.kernel_words import check_words

    if need.context:
        checkpoint = replace(checkpoint, spec=checkpoint.spec.with_context(need.context))
    check_words(gpu_rank_shape(checkpoint, 0, count, kv_dtype, whole_windows=need.whole_windows))


def _unfit(gpu: Gpu, need: _Need) -> str:
    """Why this GPU cannot run a rank now; empty if it can."""
    if gpu.compute != KERNEL_COMPUTE:
        have, want = (".".join(map(str, numbers)) for numbers in (gpu.compute, KERNEL_COMPUTE))
        return f"has compute capability {have}, and the kernel is for {want} (H100, H200); use --device cpu"
    if use := use_of(gpu):
        return use
    if not _has_room(gpu, need):
        of_prefill = need.of_prefill
        share = f" ({_gib(of_prefill)} of that for prefill, which --prefill off does without)" if of_prefill else ""
        return (
            f"has {_gib(gpu.free_bytes)} of free memory and a rank needs {_gib(need.num_bytes)}{share}; "
            f"stop what uses it (kog-doctor shows it), or use another"
        )
    return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _choose_unasked(
    settings: LaunchConfig, checkpoint: Checkpoint, visible: Visible, inventory: Inventory, kv_dtype: str
) -> GpuChoice | None:
    """As many GPUs as can be used, None where CPU ranks are the better answer.

    Nobody asked for GPUs, so it raises LaunchError for one reason alone: prefill was asked for, and all that GPUs lack is that.
    """
    from kog_dist.collectives.cuda_abi import MAX_RANKS

    num_lanes = checkpoint.spec.num_lanes
    for count in range(min(MAX_RANKS, len(visible.gpus)), 0, -1):
        if num_lanes % count or settings.ranks not in (0, count):
            continue
        try:
            needs = _needs(settings, checkpoint, count, kv_dtype)
        except ConfigError:
            continue
        frees = sorted((gpu.free_bytes for gpu in visible.gpus if not gpu.has_mig), reverse=True)
        shorter = _shorter(settings, checkpoint, count, kv_dtype, frees[count - 1]) if len(frees) >= count else ()
        for need in itertools.chain(needs, shorter):
            fit = [gpu for gpu in visible.gpus if not gpu.has_mig and not _unfit(gpu, need)]
            together = (gpus for gpus in itertools.combinations(fit, count) if not inventory.obstacle_between(gpus))
            if (gpus := next(together, ())) and not any(_obstacles(inventory, gpus, count, need)):
                try:
                    _check_words(checkpoint, count, kv_dtype, need)
                except PlanError:
                    break
                return _choice(count, kv_dtype, inventory, gpus, need)
    if settings.prefill == "on":
        without = _choose_unasked(replace(settings, prefill="off"), checkpoint, visible, inventory, kv_dtype)
        if without is not None:
            need = _needs(settings, checkpoint, without.count, kv_dtype)[-1]
            raise next(_obstacles(inventory, without.gpus, without.count, need))
    return None
