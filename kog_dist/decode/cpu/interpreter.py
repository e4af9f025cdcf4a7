"""Executes the plan of one rank in NumPy: the engine of CPU ranks, and the definition of what the kernel must compute.

The plan is compiled once into a flat list of calls; a token runs through it. Before each call the values that it reads are
compared with what the plan says they must be (value and token): a wrong plan ends in PlanError, never in a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.cpu.cursor import Choose, Cursor, PassPart
from kog_dist.decode.cpu.delta_calls import DeltaCalls
from kog_dist.decode.cpu.exchange_calls import ExchangeCalls, RankExchange
from kog_dist.decode.cpu.expert_calls import ExpertCalls
from kog_dist.decode.cpu.groups import Finder, Group, group_steps
from kog_dist.decode.cpu.lane_calls import LaneCalls, rotation_angles
from kog_dist.decode.cpu.memory import Memory
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.plan.recipes import recipe_of
from kog_dist.decode.plan.step_rules import value_name
from kog_dist.decode.plan.steps import NONE, Phase, Site, Value, When
from kog_dist.decode.plan.validate import check
from kog_dist.errors import ConfigError, PlanError
from kog_dist.late_numpy import Array
from kog_dist.model.layers import DeltaNet, Experts
from kog_dist.model.weights import RankWeights
from kog_dist.records import dataclass
from kog_dist.sampling_params import SamplingParams

KV_DTYPES = ("float32", "float16", "bfloat16", "float64", *KV_FORMATS)


@dataclass
class StepOutput:
    """Result of one token. `token_id` is -1 for a prompt token, and undefined if `finite` is false.

    `logits` (vocab,) are set on rank 0 when they were gathered. `finite` (equal on all ranks) says that no logit was NaN or
    infinite. `stopped` (equal on all ranks): rank 0 wants to stop; all ranks leave the request after the same token.
    """

    token_id: int
    logits: Array | None
    finite: bool
    stopped: bool


Maker = Callable[[Group], Callable[[], None]]


class KindCalls(Protocol):
    """Makes the calls of a kind of mixer or FFN that `LaneCalls` does not; see there."""

    makers: dict[Phase, Maker]

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None: ...


OF_KINDS: dict[type, type[KindCalls]] = {Experts: ExpertCalls, DeltaNet: DeltaCalls}

Write = tuple[slice, list[int]]  # neighbouring cells, and the identities of the values written there
Gate = tuple[Callable[[list[int]], Any], Any, Callable[[], None], tuple[Write, ...]]


@dataclass(frozen=True, slots=True)
class _Call:
    """Consecutive steps of one phase, run as one: the cells of what they read and write, and the values wanted there.

    The same for any number of tokens.
    """

    group: Group
    reads: tuple[Value, ...]
    read_cells: tuple[int, ...]
    read_idents: tuple[int, ...]
    writes: tuple[Write, ...]

    def gate(self, run: Callable[[], None], *, reads: bool = True) -> Gate:
        """What the loop over calls needs: all reads are in order if `gate[0](tags) == gate[1]`, one comparison in C."""
        getter: Callable[[list[int]], Any] = itemgetter(*self.read_cells) if reads and self.read_cells else _nothing
        wanted: Any = None
        if getter is not _nothing:
            wanted = self.read_idents if len(self.read_idents) > 1 else self.read_idents[0]  # as itemgetter gives them
        return getter, wanted, run, self.writes


@dataclass(frozen=True, slots=True)
class _Program:
    """The calls of a pass, and their gates."""

    calls: list[_Call]
    gates: list[Gate]

    @classmethod
    def of(cls, calls: list[tuple[_Call, Callable[[], None]]], when: When) -> _Program:
        """A prompt token has no logits for SAMPLE to read; it exchanges empty candidates all the same."""

        def has_reads(call: _Call) -> bool:
            return call.group.phase is not Phase.SAMPLE or when is not When.ALWAYS

        return cls([call for call, _ in calls], [call.gate(run, reads=has_reads(call)) for call, run in calls])


def _runs(cells: list[tuple[int, int]]) -> Iterator[Write]:
    """Join (cell, identity) pairs whose cells are neighbours."""
    start = 0
    for k in range(1, len(cells) + 1):
        if k == len(cells) or cells[k][0] != cells[k - 1][0] + 1:
            yield slice(cells[start][0], cells[k - 1][0] + 1), [ident for _, ident in cells[start:k]]
            start = k


def _nothing(_tags: list[int]) -> None:
    return None


class Interpreter:
    """One rank's engine. `run`, `step`, `verify` and `read` are collective: every rank calls them with the same arguments. The
    last three are about the KV cache that `use_cache` named last.

    With world size 1 `comm` may be None. float64 is for checks and needs world size 1, since mailboxes carry float32.
    `kv_dtype`: what keys and values are rounded to when they enter a cache (which holds them in `dtype`).
    `num_kv_caches`: sequences that can be kept at a time; each takes memory for the positions that were ever written to it.
    Raises PlanError if the plan is not fit to run, ConfigError if plan, weights and options do not go together.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        weights: RankWeights,
        comm: RankExchange | None,
        *,
        dtype: DTypeLike = np.float32,
        kv_dtype: str = "float32",
        num_kv_caches: int = 1,
        is_checked: bool = False,
    ) -> None:
        if not is_checked:
            check(plan)
        self._check_options(plan, rank, comm, np.dtype(dtype), kv_dtype)
        self.plan, self.rank = plan, rank
        lanes = plan.ranks[rank].lanes
        self.memory = Memory(plan.spec, lanes, np.dtype(dtype), num_kv_caches, plan.num_tokens - 1)
        self._cursor = Cursor(plan, len(lanes), num_kv_caches, rotation_angles(plan.spec, self.memory.dtype))
        self._weights, self._comm, self._kv_dtype = weights, comm, kv_dtype
        self._cells: dict[tuple[int, ...], int] = {}
        self._idents: dict[Value, int] = {}
        self._calls = [self._call(group) for group in group_steps(plan.ranks[rank].steps)]
        self._programs: dict[tuple[When, int], _Program] = {}
        self._compile(1, When.GATHERED)
        self._tags: list[int] = []  # by cell: identity of the value that it holds; 0 = none of this pass

    @staticmethod
    def _check_options(plan: Plan, rank: int, comm: RankExchange | None, dtype: np.dtype[Any], kv_dtype: str) -> None:
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not supported; use one of {', '.join(KV_DTYPES)}")
        if kv_dtype == "float64" and dtype != np.float64:
            raise ConfigError(f"kv_dtype float64 needs dtype float64, not {dtype}")
        if dtype not in (np.float32, np.float64):
            raise ConfigError(f"the interpreter computes in float32 or float64, not {dtype}")
        if plan.world_size > 1:
            if dtype != np.float32:
                raise ConfigError(
                    f"{dtype} needs world size 1: mailboxes carry float32, and the plan has {plan.world_size} ranks"
                )
            if comm is None or (comm.rank, comm.world_size) != (rank, plan.world_size):
                found = "none" if comm is None else f"that of rank {comm.rank} of {comm.world_size}"
                raise PlanError(f"rank {rank} of {plan.world_size} needs its own communicator, got {found}")

    def _compile(self, num_tokens: int, most: When) -> None:
        """Make the programs for passes of so many tokens, up to the one that runs all steps until `most`."""
        num_chosen = 0 if most is When.ALWAYS else num_tokens
        find, weights, spec = Finder(self.rank, self.memory, num_tokens, num_chosen), self._weights, self.plan.spec
        makers = LaneCalls(find, weights, self._cursor, self._kv_dtype).makers
        exchange = ExchangeCalls(find, weights, self._cursor, self._comm)
        makers |= exchange.makers
        kinds = set(map(type, spec.kinds))
        of_kinds = {
            kind: calls(find, weights, self._cursor, exchange).makers for kind, calls in OF_KINDS.items() if kind in kinds
        }

        def maker(group: Group) -> Maker:
            recipe = recipe_of(spec, group.steps[0].layer, group.phase)
            if recipe is None:
                return makers[group.phase]
            layer = spec.layers[group.steps[0].layer]
            part = layer.mixer if recipe.site is Site.ATTENTION else layer.ffn
            return of_kinds.get(type(part), makers).get(group.phase) or makers[group.phase]

        made = [(call, maker(call.group)(call.group)) for call in self._calls if call.group.when <= most]
        for when in When:
            if when <= most:
                calls = [(call, run) for call, run in made if call.group.when <= when]
                self._programs[when, num_tokens] = _Program.of(calls, when)

    def _call(self, group: Group) -> _Call:
        reads = [value for step in group.steps for value in step.reads]
        # By value first, then by lane: what a phase writes for its lanes then stands side by side.
        writes = [value for values in zip(*(step.writes for step in group.steps), strict=True) for value in values]
        return _Call(
            group,
            tuple(reads),
            tuple(map(self._cell, reads)),
            tuple(map(self._ident, reads)),
            tuple(_runs([(self._cell(value), self._ident(value)) for value in writes])),
        )

    def _cell(self, value: Value) -> int:
        return self._cells.setdefault(self.plan.place(value), len(self._cells))

    def _ident(self, value: Value) -> int:
        return self._idents.setdefault(value, len(self._idents) + 1)

    @property
    def num_positions(self) -> int:
        """Positions that the KV cache in use holds."""
        return self._cursor.held[self._cursor.kv_cache]

    def use_cache(self, cache: int, source: int, num_positions: int, load_state: Callable[[], None] | None = None) -> None:
        """Go on in KV cache `cache` behind the first `num_positions` of cache `source`, which are copied if the two differ.

        `load_state` puts a state of so many positions into `cache`; None: it is that of `source`.
        Epochs go on as well: every rank must have run the same number of steps. Raises PlanError if that cannot be.
        """
        cursor = self._cursor
        if not (0 <= cache < len(cursor.held) and 0 <= source < len(cursor.held)):
            raise PlanError(f"there are {len(cursor.held)} KV caches, asked for {cache} and {source}")
        if not 0 <= num_positions <= cursor.held[source]:
            raise PlanError(f"KV cache {source} holds {cursor.held[source]} positions, asked for {num_positions}")
        if self.plan.spec.is_recurrent:
            self._settle_all({})  # the next pass takes the place of what drafts of the last one were made of
            if load_state is not None:
                load_state()
            elif num_positions not in (0, cursor.settled[source]):
                raise PlanError(
                    f"KV cache {source} holds a state of {cursor.settled[source]} positions, which cannot go to {num_positions}"
                )
            elif cache != source:
                for layer in self.memory.states:
                    for array, other in zip(layer[source], layer[cache], strict=True):
                        other[...] = array
        if cache != source:
            for layer_caches in (*self.memory.keys, *self.memory.values):
                layer_caches[cache][:, :, :num_positions] = layer_caches[source][:, :, :num_positions]
        cursor.kv_cache = cache
        cursor.held[cache] = cursor.settled[cache] = num_positions

    def go_back(self, num_positions: int, cache: int | None = None) -> None:
        """Drop what KV cache `cache`, or the one in use, holds behind so many positions, all of the last pass."""
        self.settle(num_positions, cache)
        self._cursor.held[self._cursor.kv_cache if cache is None else cache] = num_positions

    def settle(self, num_positions: int, cache: int | None = None) -> None:
        """Have the state of `cache`, or of the one in use, behind so many positions: drafts of the last pass that count change it
        only now.
        """
        cursor = self._cursor
        cache = cursor.kv_cache if cache is None else cache
        first = cursor.settled[cache]
        if not self.plan.spec.is_recurrent or num_positions == first:
            return
        if not first < num_positions <= cursor.held[cache]:
            raise PlanError(f"KV cache {cache} holds a state of {first} positions, which cannot go to {num_positions}")
        num, (row, position) = num_positions - first, cursor.drafted[cache]
        with np.errstate(all="ignore"):
            for replay in cursor.replays.values():
                replay(cache, row + first - position, num, num)
        cursor.settled[cache] = num_positions

    def _settle_all(self, begins: Mapping[int, int]) -> None:
        """A pass begins at `begins`, positions by KV cache: so many drafts of the one before count, and all of other caches. What
        cannot follow `Cursor.begin` refuses.
        """
        cursor = self._cursor
        for cache, (settled, held) in enumerate(zip(cursor.settled, cursor.held, strict=True)):
            position = begins.get(cache, held)
            if settled < position <= held:
                self.settle(position, cache)

    def filled(self, cache: int, num_positions: int) -> None:
        """Keys and values of the first positions of a cache have been put there (`memory`), as many as it then holds.

        The state that belongs to them comes with `use_cache`.
        """
        self._cursor.held[cache] = self._cursor.settled[cache] = num_positions

    def step(
        self,
        token_id: int,
        position: int,
        sampling: SamplingParams | None,
        gather_logits: bool = False,
        *,
        stop: bool = False,
        choose: Choose | None = None,
    ) -> StepOutput:
        """Run one token through the model and choose its successor; `sampling` None = a prompt token, which has none.

        `stop`, which only rank 0 may decide, travels to all ranks with this token's candidates. So does what `choose` makes of
        the gathered logits: rank 0 may give it besides `sampling`, which the other ranks give, and whose candidates it beats.
        `position` may be at most the number of positions in the cache: a smaller one drops those from it on.
        Raises PlanError if a value is not what the plan says; AbortedError or DeviceError from a wait that did not end well.
        """
        if sampling is None:
            self._check_choose(choose, gather_logits=False)
            return self.read((token_id,), position, stop=stop)
        return self.verify((token_id,), position, sampling, gather_logits, stop=stop, choose=choose)[0]

    def _check_choose(self, choose: Choose | None, *, gather_logits: bool) -> None:
        if choose is not None and (self.rank != 0 or not gather_logits):
            raise PlanError(f"rank {self.rank} cannot choose by itself: only rank 0 does, for a sampled token with all logits")

    def verify(
        self,
        token_ids: Sequence[int],
        position: int,
        sampling: SamplingParams,
        gather_logits: bool = False,
        *,
        stop: bool = False,
        choose: Choose | None = None,
    ) -> list[StepOutput]:
        """Run a token and drafts of those behind it through the model in one pass of the weights: what `step` makes of the first,
        and of each draft as long as it is what was chosen in front of it, bit by bit.

        Keys and values of the other drafts are in no kept position. Arguments and errors as of `step`.
        """
        part = PassPart(token_ids, position, sampling, self._cursor.kv_cache, stop, choose)
        return self.run((part,), gather_logits)[0]

    def run(self, parts: Sequence[PassPart], gather_logits: bool = False, *, word: int = 0) -> list[list[StepOutput]]:
        """Run the tokens of several requests, each in a KV cache of its own, through the model in one pass of the weights: of
        each part what `verify` makes of it alone, bit by bit. Or, where it is one of a prompt, what `read` does.

        `word`: less than 2 ** (WORD_BITS - 1). What rank 0 gives here all ranks find in `heard` behind the pass.
        Errors as of `step`.
        """
        cursor, num_tokens, reads = self._cursor, sum(len(part.token_ids) for part in parts), parts[0].sampling is None
        for part in parts:
            self._check_choose(part.choose, gather_logits=gather_logits)
        if not reads and num_tokens > self.plan.num_tokens and self.plan.spec.is_recurrent:
            raise PlanError(
                f"a pass of {num_tokens} tokens has more drafts than the plan, whose passes have {self.plan.num_tokens}"
            )
        when = When.ALWAYS if reads else When.GATHERED if gather_logits else When.SAMPLED
        if (when, num_tokens) not in self._programs:
            self._compile(num_tokens, When.ALWAYS if reads else When.GATHERED)
        if self.plan.spec.is_recurrent:
            self._settle_all({part.cache: part.position for part in parts})
        cursor.begin(parts, word)
        self._run(when)
        for part in parts:
            num_known = len(part.token_ids) if reads else 1
            cursor.held[part.cache] = part.position + (num_known if reads else len(part.chosen))
            cursor.settled[part.cache] = part.position + num_known
            cursor.drafted[part.cache] = part.first, part.position + 1
        if reads:
            return [[StepOutput(NONE, None, True, parts[0].chosen[0].stopped)]]
        logits = cursor.all_logits
        return [
            [
                StepOutput(token, None if logits is None else logits[part.first + idx], finite, stopped)
                for idx, (token, finite, stopped) in enumerate(part.chosen)
            ]
            for part in parts
        ]

    @property
    def heard(self) -> int:
        """The word of rank 0, behind a pass."""
        return self._cursor.heard

    def prepare(self, num_tokens: int) -> None:
        """Compile passes of so many tokens that choose; else the first of them does that."""
        if (When.GATHERED, num_tokens) not in self._programs:
            self._compile(num_tokens, When.GATHERED)

    def read(self, token_ids: Sequence[int], position: int, *, stop: bool = False) -> StepOutput:
        """Run following prompt tokens through the model in one pass of the weights: what `step` does with each, bit by bit.

        A number of tokens is compiled when it is first asked for. `stop`, `position` and errors as of `step`.
        """
        return self.run((PassPart(token_ids, position, None, self._cursor.kv_cache, stop),))[0][0]

    def _run(self, when: When) -> None:
        cursor = self._cursor
        program = self._programs[when, len(cursor.token_ids)]
        tags = self._tags = [0] * len(self._cells)
        with np.errstate(all="ignore"):  # what overflows ends in logits that are not finite, and is reported so
            for number, (getter, wanted, run, writes) in enumerate(program.gates):
                if getter(tags) != wanted:
                    raise PlanError(self._complaint(program.calls[number]))
                run()
                for cells, idents in writes:
                    tags[cells] = idents

    def _complaint(self, call: _Call) -> str:
        found = [self._tags[cell] for cell in call.read_cells]
        wrong = next(k for k, ident in enumerate(call.read_idents) if found[k] != ident)
        held = next(
            (value_name(value) for value, ident in self._idents.items() if ident == found[wrong]), "nothing of this token"
        )
        where = f"rank {self.rank}, phase {call.group.phase.name}, token {self._cursor.token}"
        wanted = value_name(call.reads[wrong])
        return f"{where}: the step reads {wanted}, but its place holds {held}; the plan runs its steps in a wrong order"
