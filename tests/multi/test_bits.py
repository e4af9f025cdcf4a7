"""Every world size gives the same bits.

Every form of model runs on ranks that are threads and exchange through a few lines of Python; some forms also on real rank
processes with the communicator of CPU ranks.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.collectives.ranks import run_ranks as run_processes
from kog_dist.decode.cpu.interpreter import Interpreter, StepOutput
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.sampling import Candidate, Sampler, token_logprobs
from kog_dist.errors import AbortedError, PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams

HERE = Path(__file__).parent
DEADLINE_S = 60.0
PROMPT = (3, 17, 4, 90, 41)
NUM_GENERATED = 12
Row = NDArray[np.float32]


class Board:
    """Mailboxes of all ranks in one process: (mailbox, slot, source) -> the last (epoch, row) published there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rows: dict[tuple[str, int, int], tuple[int, Row]] = {}
        self.changed = threading.Condition()
        self.failed = False

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class ThreadExchange:
    """The communicator of one rank; slots are overwritten as in shared memory, and a lost message is an error."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.world_size = board, rank, board.world_size

    def publish(self, mailbox: str, slot: int, epoch: int, values: Row) -> None:
        assert values.dtype == np.float32
        with self.board.changed:
            self.board.rows[mailbox, slot, self.rank] = (epoch, values.copy())
            self.board.changed.notify_all()

    def collect(self, mailbox: str, slot: int, epoch: int, own: Row) -> NDArray[np.float32]:
        def row(source: int) -> Row:
            if source == self.rank:
                return own
            key = (mailbox, slot, source)

            def ready() -> bool:
                return self.board.failed or self.board.rows.get(key, (0, own))[0] >= epoch

            if not self.board.changed.wait_for(ready, DEADLINE_S) or self.board.failed:
                raise AbortedError(f"rank {self.rank} never saw {key} at epoch {epoch}")
            found, values = self.board.rows[key]
            assert found == epoch, f"rank {self.rank} lost {key} of epoch {epoch}: it holds {found}"
            return values

        with self.board.changed:
            return np.stack([row(source) for source in range(self.world_size)])

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: Row) -> Row:
        rows: list[Row] = list(self.collect(mailbox, slot, epoch, own))
        while len(rows) > 1:
            rows = [np.add(a, b) for a, b in zip(rows[0::2], rows[1::2], strict=True)]
        return rows[0]


def run_ranks(world_size: int, work: Callable[[int, ThreadExchange], Any]) -> list[Any]:
    """What `work` returns on every rank; the first error of any."""
    board = Board(world_size)

    def rank_main(rank: int) -> Any:
        try:
            return work(rank, ThreadExchange(board, rank))
        except BaseException:
            board.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(world_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, AbortedError)), errors[0])
        return [future.result() for future in futures]


def generate(folder: Path, world_size: int, sampling: SamplingParams, kv_dtype: str = "float32") -> list[StepOutput]:
    """Outputs of rank 0 for the prompt and the tokens that follow; all ranks must choose the same tokens."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size)

    def work(rank: int, exchange: ThreadExchange) -> list[StepOutput]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes)
        engine = Interpreter(plan, rank, weights, exchange, kv_dtype=kv_dtype)
        outputs, token = [], PROMPT[0]
        for position in range(len(PROMPT) + NUM_GENERATED):
            wanted = sampling if position >= len(PROMPT) - 1 else None
            output = engine.step(token, position, wanted, gather_logits=True)
            outputs.append(output)
            token = PROMPT[position + 1] if position + 1 < len(PROMPT) else output.token_id
        return outputs

    ranks: list[list[StepOutput]] = run_ranks(world_size, work)
    for outputs in ranks[1:]:
        assert [o.token_id for o in outputs] == [o.token_id for o in ranks[0]]
        assert [o.finite for o in outputs] == [o.finite for o in ranks[0]]
    return ranks[0]


BASE = ModelSpec(
    hidden_size=64, num_layers=6, num_heads=16, num_kv_heads=8, intermediate_size=96, vocab_size=104, max_context=32,
    num_lanes=8, delay=2, sliding_window=7, window_layers=(0, 1, 3),
)  # fmt: skip
SPECS = {
    "laneformer": BASE,
    "pre_norm": replace(BASE, pre_norm_lane_agg=True),
    "lane_head": replace(BASE, head_type=HeadType.LANE),
    "vocab_parallel": replace(BASE, head_type=HeadType.VOCAB_PARALLEL, shared_norm_scale=False),
    "per_lane_norms": replace(BASE, shared_norm_scale=False),
    "per_lane_norms_pre_norm": replace(BASE, shared_norm_scale=False, pre_norm_lane_agg=True),
    "tied_uneven_vocab": replace(BASE, tied_embeddings=True, vocab_size=101),
    "no_early_comm": replace(BASE, early_comm=False),
    "no_attention_comm": replace(BASE, attention_comm=False),
    "no_comm": replace(BASE, attention_comm=False, mlp_comm=False, head_type=HeadType.LANE),
    "delay_0": replace(BASE, delay=0),
    "biases_and_head_norms": replace(BASE, delay=0, own_head_dim=10, qkv_bias=True, qk_norm=True),
    "delay_1": replace(BASE, delay=1),
    "delay_3": replace(BASE, delay=3, early_comm=False),
    "delay_exceeds_layers": replace(BASE, delay=9),
    "all_windowed": replace(BASE, sliding_window=3, window_layers=tuple(range(6))),
    "no_window": replace(BASE, sliding_window=None, window_layers=()),
    "experts": replace(BASE, delay=0, experts=ExpertsSpec(6, 2)),
    "experts_with_biases": replace(
        BASE,
        delay=0,
        qkv_bias=True,
        out_bias=True,
        attention_sinks=True,
        experts=ExpertsSpec(5, 3, is_normalised=False, router_bias=True, bias=True, clamp=ClampedSwiglu(1.7, 0.5)),
    ),
    "rope_scaling": replace(BASE, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8)),
}
# What passes and drafts ask of all kinds, `make test` asks of the others.
SWEPT = SPECS.keys() - {
    "laneformer", "lane_head", "tied_uneven_vocab", "biases_and_head_norms", "delay_1", "no_window", "experts_with_biases"
}  # fmt: skip


@pytest.fixture(scope="module", params=SPECS, ids=list(SPECS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = SPECS[request.param]
    target = tmp_path_factory.mktemp(request.param)
    write_checkpoint(target, spec, random_tensors(spec, seed=11))
    return target


def bits(outputs: list[StepOutput]) -> list[bytes]:
    return [output.logits.tobytes() for output in outputs if output.logits is not None]


def test_logits_and_tokens_do_not_depend_on_the_world_size(folder: Path) -> None:
    alone = generate(folder, 1, SamplingParams())
    assert len(set(bits(alone))) == NUM_GENERATED + 1, "logits that repeat would hide differences"
    for world_size in (2, 4, 8):
        several = generate(folder, world_size, SamplingParams())
        assert [o.token_id for o in several] == [o.token_id for o in alone]
        assert bits(several) == bits(alone), f"{world_size} ranks give other bits than 1"
        assert all(o.finite for o in several)


@pytest.mark.parametrize(
    ("sampling", "kv_dtype"),
    [
        (SamplingParams(0.9, seed=5), "float32"),
        (SamplingParams(), "bfloat16"),
        (SamplingParams(), "fp8"),
        (SamplingParams(), "int4"),
    ],
)
def test_sampling_and_narrow_caches_do_not_depend_on_it_either(sampling: SamplingParams, kv_dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, BASE, random_tensors(BASE, seed=11))
    plain = generate(tmp_path, 1, SamplingParams())
    alone = generate(tmp_path, 1, sampling, kv_dtype)
    for world_size in (2, 4):
        several = generate(tmp_path, world_size, sampling, kv_dtype)
        assert [o.token_id for o in several] == [o.token_id for o in alone]
        assert bits(several) == bits(alone)
    assert bits(alone) != bits(plain)


def generate_with_processors(
    folder: Path, world_size: int, sampling: SamplingParams, processors: SamplingParams
) -> list[tuple[int, TokenLogprobs]]:
    """Tokens of rank 0 and their log-probabilities; all ranks must take its choice, which only rank 0 knows."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size)

    def work(rank: int, exchange: ThreadExchange) -> list[tuple[int, TokenLogprobs | None]]:
        engine = Interpreter(plan, rank, checkpoint.rank_weights(plan.ranks[rank].lanes), exchange)
        shaper = Sampler(
            checkpoint.spec.vocab_size, PROMPT, replace(processors, temperature=sampling.temperature, seed=sampling.seed)
        )
        for position, token in enumerate(PROMPT[:-1]):
            engine.step(token, position, None)
        found: list[tuple[int, TokenLogprobs | None]] = []
        token = PROMPT[-1]
        for position in range(len(PROMPT) - 1, len(PROMPT) - 1 + NUM_GENERATED):
            choose = shaper.choose if rank == 0 else None
            output = engine.step(token, position, sampling, gather_logits=True, choose=choose)
            assert output.finite
            token = output.token_id
            shaper.accept(token)
            found.append((token, None if output.logits is None else token_logprobs(output.logits, token, 3)))
        return found

    first, *others = run_ranks(world_size, work)
    for other in others:
        assert [token for token, _ in other] == [token for token, _ in first]
    return [(token, logprobs) for token, logprobs in first if logprobs is not None]


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (SamplingParams(1.5, seed=4), SamplingParams(top_k=30, top_p=0.8, min_p=0.05, presence_penalty=0.4)),
        (SamplingParams(), SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, logit_bias=((50, 0.75), (7, -3.0)))),
    ],
)
def test_processed_choices_and_logprobs_do_not_depend_on_the_world_size(
    sampling: SamplingParams, processors: SamplingParams, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, BASE, random_tensors(BASE, seed=11))
    alone = generate_with_processors(tmp_path, 1, sampling, processors)
    assert len(alone) == NUM_GENERATED
    plain = [output.token_id for output in generate(tmp_path, 1, sampling) if output.logits is not None]
    assert [token for token, _ in alone] != plain[:NUM_GENERATED], "the processors must matter for this test to mean anything"
    for world_size in (2, 4, 8):
        assert generate_with_processors(tmp_path, world_size, sampling, processors) == alone


def test_rank_0_alone_chooses_and_only_from_all_logits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, BASE, random_tensors(BASE, seed=11))
    plan = make_plan(BASE, 2)

    def work(rank: int, exchange: ThreadExchange) -> list[tuple[int, bool, bool]]:
        engine = Interpreter(plan, rank, open_checkpoint(tmp_path).rank_weights(plan.ranks[rank].lanes), exchange)
        with pytest.raises(PlanError, match="cannot choose by itself"):
            engine.step(1, 0, SamplingParams(), gather_logits=rank == 1, choose=lambda *_: None)
        outputs = []
        answers = [Candidate(-1e30, 33), Candidate(math.nan, 0), None]
        for position, answer in enumerate(answers):
            choose = partial(lambda found, *_: found, answer) if rank == 0 else None
            outputs.append(engine.step(1, position, SamplingParams(), gather_logits=True, choose=choose))
        return [(o.token_id, o.finite, o.stopped) for o in outputs]

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == (33, True, False), "the worst score wins when rank 0 says so"
    assert first[1][1:] == (False, False)
    assert first[2][1:] == (True, True), "nothing can be chosen: all ranks leave"


def test_a_logit_that_is_not_finite_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, BASE, random_tensors(BASE, seed=11))
    plan = make_plan(BASE, 4)

    def work(rank: int, exchange: ThreadExchange) -> list[tuple[bool, int]]:
        weights = open_checkpoint(tmp_path).rank_weights(plan.ranks[rank].lanes)
        if rank == 2:
            weights.heads[5][0, 0] = np.inf
        engine = Interpreter(plan, rank, weights, exchange)
        outputs = [engine.step(1, 0, None), engine.step(2, 1, SamplingParams()), engine.step(3, 2, None)]
        return [(output.finite, output.token_id) for output in outputs]

    ranks = run_ranks(4, work)
    assert [finite for finite, _ in ranks[0]] == [True, False, True]
    assert ranks == [ranks[0]] * 4


@pytest.mark.parametrize(
    ("name", "world_size", "temperature"),
    [
        ("laneformer", 2, 0.0), ("laneformer", 8, 0.7), ("pre_norm", 4, 0.0), ("lane_head", 4, 0.7), ("vocab_parallel", 4, 0.0),
        ("delay_0", 2, 0.0), ("experts", 4, 0.0),
    ],
)  # fmt: skip
def test_rank_processes_give_the_same_bits(name: str, world_size: int, temperature: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPECS[name], random_tensors(SPECS[name], seed=11))
    alone = [o for o in generate(tmp_path, 1, SamplingParams(temperature, seed=3)) if o.logits is not None]
    arguments = {
        "folder": str(tmp_path), "temperature": temperature, "seed": 3, "prompt": list(PROMPT), "num_generated": NUM_GENERATED,
    }  # fmt: skip
    outcomes = run_processes(
        world_size, "engine_bodies:generate", arguments, deadline_s=DEADLINE_S, search_path=(HERE, HERE.parents[1])
    )
    assert [outcome.status for outcome in outcomes] == [0] * world_size, "\n".join(o.error for o in outcomes if o.error)
    tokens = [o.token_id for o in alone]
    assert [[token for token, _ in outcome.result] for outcome in outcomes] == [tokens] * world_size
    digests = [hashlib.sha256(o.logits.tobytes()).hexdigest() for o in alone if o.logits is not None]
    assert [digest for _, digest in outcomes[0].result] == digests
