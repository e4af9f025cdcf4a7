"""What a configuration asks to start: which model, on what, in how many ranks. Decided before anything is created."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.cpu_weights import SINGLE_BYTES, dequantised_bytes, kept_as, matrix_bytes
from kog_dist.decode.plan.recipes import position_values, state_bytes
from kog_dist.errors import CheckpointError, ConfigError, KogError, LaunchError
from kog_dist.hardware.cpu_lists import format_cpu_list
from kog_dist.hardware.cpus import CpuMap, read_cpu_map, share_cpus
from kog_dist.hardware.gpus import Gpu
from kog_dist.hardware.placement import ANYWHERE, Placement
from kog_dist.launch.gpu_choice import GpuChoice, choose_gpus
from kog_dist.launch.kept_prefixes import kept_on_cpu, kept_on_gpus, refuse_less_than_a_state
from kog_dist.launch.progress import compilers_shown
from kog_dist.model.gguf.folder import model_name, tagged_file
from kog_dist.model.gguf.tensors import is_gguf
from kog_dist.model.hub_cache import find_snapshot, hub_name, hub_name_and_tag, is_hub_name
from kog_dist.records import dataclass
from kog_dist.runtime import memfd

CPU_KV_CACHES = CPU_PARALLEL = 4  # unless told otherwise
_SHARE_OF_MEMORY = 80  # percent of what is free, for KV caches
_CONTEXT_STEP = 256

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Target:
    """A model whose metadata is in order, and the ranks that will run it."""

    folder: Path
    model_name: str
    checkpoint: Checkpoint
    world_size: int
    device: str  # cpu or cuda
    kv_dtype: str
    gpus: tuple[Gpu, ...] = ()  # GPU of every rank; empty on CPU ranks, and in a plan for GPUs that are not here
    placements: tuple[Placement, ...] = ()  # of every rank; empty: the default
    num_kv_caches: int = 1  # of every rank
    parallel: int = 1  # requests that decode together
    kept_bytes: int = 0  # of every rank, for the beginnings of earlier requests
    kept_host_bytes: int = 0  # and in the host's memory
    whole_windows: bool = False  # whether windowed layers of GPUs keep all positions
    prefill: str = "off"  # on, auto or off: whether GPUs take prompts in blocks
    drafts: bool = True  # whether ranks can draft tokens
    note: str = ""  # for the launcher's log

    def rank_device(self, rank: int) -> str:
        """Device of a rank as its worker is told, which sees exactly the GPUs of its placement: `cpu` or `cuda:INDEX`."""
        return f"cuda:{rank}" if self.device == "cuda" else self.device

    def placement(self, rank: int) -> Placement:
        """Where the rank's process runs."""
        return self.placements[rank] if self.placements else ANYWHERE

    def place(self, rank: int) -> str:
        """The same for people: device and CPUs."""
        device = str(self.gpus[rank]) if self.gpus else "a GPU that is not here" if self.device == "cuda" else "cpu"
        cpus = self.placement(rank).cpus
        return f"{device}, pinned to CPUs {cpus}" if cpus else f"{device}, not pinned"


def model_folder(settings: LaunchConfig) -> tuple[Path, str]:
    """Folder (or GGUF file) and display name of the configured model, which may be a name in the Hugging Face cache.

    Raises CheckpointError when there is none.
    """
    if settings.model is not None:
        folder = Path(settings.model)
        if is_gguf(folder):
            # A link of a cache leads to what is called otherwise.
            return folder.parent.resolve() / folder.name, model_name(folder)
        if not os.path.isdir(folder):
            name, tag = hub_name_and_tag(settings.model)
            if os.path.exists(folder) or not is_hub_name(name):
                what = "is neither a folder nor a .gguf file" if os.path.exists(folder) else "does not exist"
                raise CheckpointError(f"MODEL {folder} {what}; give the folder of a published checkpoint")
            folder = find_snapshot(name, os.environ)
            if tag:
                return tagged_file(folder, tag), f"{name}:{tag}"
        folder = folder.resolve()
        return folder, hub_name(folder) or folder.name
    folder = Path(str(resources.files("kog_dist"))) / "models" / "demo"
    if not (folder / "config.json").is_file():
        raise CheckpointError("this installation has no bundled demo model; give MODEL, the folder of a published checkpoint")
    return folder, "demo"


def choose_target(settings: LaunchConfig) -> Target:
    """Open the checkpoint's metadata and fix device and world size. Raises ConfigError, CheckpointError or LaunchError."""
    target, obstacles = plan_target(settings)
    if obstacles:
        raise obstacles[0]
    return target


def plan_target(settings: LaunchConfig, *, needs_weights: bool = True) -> tuple[Target, tuple[KogError, ...]]:
    """The same for GPUs that are not here or that this version cannot use: what would be started, and why it cannot be.

    Without `needs_weights` a folder with a config.json alone is planned, too. Raises what is wrong with the configuration or the
    model wherever it is started.
    """
    from kog_dist.model.checkpoint import has_weights, open_checkpoint, planned_checkpoint

    folder, name = model_folder(settings)
    rounding = {"quantize": settings.quantize, "quantize_head": settings.quantize_head}
    if needs_weights or has_weights(folder):
        checkpoint = open_checkpoint(folder, verify=settings.verify, context=settings.context, **rounding)
    else:
        checkpoint = planned_checkpoint(folder, context=settings.context, **rounding)
    if settings.check_experts and checkpoint.spec.experts is None:
        raise ConfigError(f"check_experts compares which experts are chosen, and {name} has none; leave it out")
    choice = choose_gpus(settings, checkpoint, os.environ)
    if choice is None:
        with compilers_shown():
            host_library.library()  # says what CPU ranks can keep
        world_size = settings.ranks or _ranks_for(checkpoint.spec.num_lanes)
        checkpoint.spec.lanes_of_rank(0, world_size)
        kv_dtype = "float32" if settings.kv_dtype == "auto" else settings.kv_dtype
        parallel, num_kv_caches = _parallel(settings)
        kept_bytes = kept_on_cpu(settings, world_size, state_bytes(checkpoint.spec) // world_size, parallel)
        target = Target(
            folder,
            name,
            checkpoint,
            world_size,
            "cpu",
            kv_dtype,
            num_kv_caches=num_kv_caches,
            parallel=parallel,
            kept_bytes=kept_bytes,
            note=_cpu_note(settings, checkpoint),
        )
        return (target, ()) if settings.context else _within_memory(target)
    if choice.context:
        checkpoint = replace(checkpoint, spec=checkpoint.spec.with_context(choice.context))
    kept_bytes, kept_host_bytes = 0, 0
    if choice.obstacles:
        refuse_less_than_a_state(settings, choice.state_bytes)
    else:
        kept_bytes, kept_host_bytes = kept_on_gpus(
            settings,
            choice.spare_bytes,
            choice.count,
            has_rings=bool(checkpoint.spec.window_layers) and not choice.whole_windows,
            least=choice.kept_bytes,
            of_state=choice.state_bytes,
        )
    target = Target(
        folder, name, checkpoint, choice.count, "cuda", choice.kv_dtype, choice.gpus, kept_bytes=kept_bytes,
        kept_host_bytes=kept_host_bytes, parallel=choice.parallel, num_kv_caches=choice.num_caches,
        whole_windows=choice.whole_windows, prefill=choice.prefill, drafts=choice.drafts,
        note="; ".join(filter(None, (checkpoint.note, choice.note))),
    )  # fmt: skip
    machine = read_cpu_map() if settings.pin else None
    return replace(target, placements=place_on_gpus(choice, machine)), choice.obstacles


def _parallel(settings: LaunchConfig) -> tuple[int, int]:
    """Requests that decode together on CPU ranks, and KV caches. Raises ConfigError if there are not enough of these."""
    asked, num_caches = settings.parallel, settings.kv_caches
    if num_caches and asked > num_caches:
        raise ConfigError(f"parallel {asked} needs a KV cache for each request, and kv_caches is {num_caches}; ask for {asked}")
    parallel = asked or min(CPU_PARALLEL, num_caches or CPU_PARALLEL)
    return parallel, num_caches or max(CPU_KV_CACHES, parallel)


def _cpu_note(settings: LaunchConfig, checkpoint: Checkpoint) -> str:
    """What the checkpoint's note says; and a reason where nobody asked for CPU ranks and weights rule out GPUs, however many."""
    reason = why_not_on_gpus(checkpoint) if settings.device == "auto" else ""
    return "; ".join(filter(None, (checkpoint.note, reason and f"CPU ranks: {reason}")))


def why_not_on_gpus(checkpoint: Checkpoint) -> str:
    """Why the kernel does not have a model's layers, or read its quantised weights; empty if it does."""
    from kog_dist.workers.cuda.coded_source import coding_of
    from kog_dist.workers.cuda.model_limits import unsupported, untried

    if findings := unsupported(checkpoint.spec):
        return f"GPUs cannot run this model yet: it has {'; '.join(findings)}"
    try:
        coding = coding_of(checkpoint)
    except ConfigError as error:
        return str(error).removesuffix("; use --device cpu")
    if what := untried(checkpoint.spec, coding):
        return f"GPUs cannot run this model yet: it has {what}, which no GPU has run yet"
    return ""


def place_on_gpus(choice: GpuChoice, machine: CpuMap | None) -> tuple[Placement, ...]:
    """A placement for every chosen GPU; without `machine` nobody is pinned.

    A GPU's CPUs are its share among all GPUs of the machine, used or not: engines that know nothing of each other never
    meet on a core, and each rank of a job can work out its own.
    """
    uuids = tuple(gpu.uuid for gpu in choice.gpus)
    if machine is None:
        return tuple(Placement("", uuids) for _ in uuids)
    shares = share_cpus([gpu.cpus for gpu in choice.inventory.gpus], machine)
    by_uuid = dict(zip((gpu.uuid for gpu in choice.inventory.gpus), shares, strict=True))
    return tuple(Placement(format_cpu_list(by_uuid[uuid]), uuids) for uuid in uuids)


def _ranks_for(num_lanes: int) -> int:
    """The largest rank count that divides the lanes and gives every rank a core."""
    num_cores = len(os.sched_getaffinity(0))
    return max(n for n in range(1, num_lanes + 1) if num_lanes % n == 0 and n <= max(num_cores, 1))


def _within_memory(target: Target) -> tuple[Target, tuple[KogError, ...]]:
    """The same with a shorter context if the KV caches of the model's would not fit this machine's free memory.

    Caches take memory as positions are written, and a full one must not be the moment when the system kills a rank. Also returns
    what cannot be had with any context.
    """
    spec, available = target.checkpoint.spec, memfd.available_bytes()
    embedding, width = spec.vocab_size * spec.hidden_size, matrix_bytes(target.checkpoint)
    weights = width * (spec.num_parameters + (target.world_size - 1) * embedding)  # every rank has the whole table
    dequantised = dequantised_bytes(target.checkpoint)
    weights += dequantised
    if weights > available:
        have = f"{available / 2**30:.1f} GiB of memory are free here"
        remedy = "use a machine with more" if why_not_on_gpus(target.checkpoint) else "use GPUs"
        error = LaunchError(
            f"CPU ranks would keep {weights / 2**30:.1f} GiB of weights in {kept_as(target.checkpoint)}, and {have}; {remedy}"
        )
        return target, (error,)
    per_position = position_values(spec) * SINGLE_BYTES * target.num_kv_caches
    kept = target.kept_bytes * target.world_size + state_bytes(spec) * target.num_kv_caches
    room = max(available - weights - kept, 0) * _SHARE_OF_MEMORY // 100 // per_position
    context = max(room // _CONTEXT_STEP, 1) * _CONTEXT_STEP
    if context >= spec.max_context:
        return target, ()
    note = (
        f"context of {context} tokens, of the model's {spec.max_context}: {target.num_kv_caches} KV caches of it fill "
        f"{_SHARE_OF_MEMORY} % of the memory that is free; --context asks for another, --kv-caches for fewer"
    )
    shorter = replace(target.checkpoint, spec=spec.with_context(context))
    return replace(target, checkpoint=shorter, note="; ".join(filter(None, (target.note, note)))), ()
