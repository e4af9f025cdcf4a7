"""KCCL's device code on a CPU: the same sources, fibers for threads, stores that arrive late and in any order (kccl_twin/).

What it computes is compared with the definitions in `collectives.reference`, bit by bit. It shows that indices, protocols and
bits are right; what the compiler and the GPU make of it, only a GPU shows.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.collectives import reference
from kog_dist.collectives.chain_reference import chain_totals
from kog_dist.collectives.cuda_abi import abi_header
from kog_dist.collectives.cuda_kernels import ChainShape, device_sources, handoff_header, ranks_header
from kog_dist.collectives.handoff_reference import handoff_results
from tests.unit.cpu_compiler import BOTH_TWINS, build, needs_compiler

TWIN = Path(__file__).parent / "kccl_twin"
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged device sources, with the twin's ptx.cuh in the place of the real one."""
    made = tmp_path_factory.mktemp("twin")
    for name, text in {**device_sources(), "abi.cuh": abi_header()}.items():
        (made / name).write_text(text)
    for path in (*BOTH_TWINS.iterdir(), *TWIN.iterdir()):
        shutil.copy(path, made)
    return made


def built(folder: Path, kernel: str, shape: str, header: str) -> Path:
    """A program of its own for each generated header."""
    name = f"{kernel}-{abs(hash(header)):x}"
    if not (folder / name).exists():
        (folder / shape).write_text(header)
        build(folder / f"{kernel}.cpp", name)
    return folder / name


def run(program: Path, *arguments: object) -> str:
    command = [str(program), *(str(argument) for argument in arguments)]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode} (4: too slow, 5: a wait ran out, 6: all threads wait for each other): "
        f"{done.stderr}"
    )
    return done.stdout


def exchange(
    folder: Path, num_ranks: int, values: NDArray[np.float32], *, delay: int, mode: int, seed: int, bits: int = 32
) -> Any:
    program = built(folder, "exchange", "ranks.cuh", ranks_header(num_ranks))
    values.tofile(folder / "in.bin")
    steps, length = values.shape[1:]
    text = run(program, seed, delay, steps, length, bits, mode, folder / "in.bin", folder / "out.bin")
    return np.fromfile(folder / "out.bin", np.float32).reshape(num_ranks, steps - delay, -1), text


def random_values(num_ranks: int, steps: int, length: int) -> NDArray[np.float32]:
    random = np.random.default_rng((num_ranks, steps, length))
    scale = 10.0 ** random.integers(-8, 8, (num_ranks, steps, length))
    return (random.standard_normal((num_ranks, steps, length)) * scale).astype(np.float32)


@pytest.mark.parametrize(("num_ranks", "delay", "steps", "length"), [(3, 0, 8, 33), (3, 2, 9, 1), (4, 1, 4, 300)])
def test_sums_have_the_bits_of_the_tree(folder: Path, num_ranks: int, delay: int, steps: int, length: int) -> None:
    values = random_values(num_ranks, steps, length)
    found, _ = exchange(folder, num_ranks, values, delay=delay, mode=2, seed=length)
    expected = np.stack([reference.all_reduce(list(values[:, step])) for step in range(steps - delay)])
    for rank in range(num_ranks):
        assert found[rank].tobytes() == expected.tobytes(), f"rank {rank}"


def test_slots_are_enough_when_tags_wrap(folder: Path) -> None:
    values = random_values(3, 20, 2)
    for seed in range(3):
        found, _ = exchange(folder, 3, values, delay=1, mode=2, seed=seed, bits=3)
        expected = np.stack([reference.all_reduce(list(values[:, step])) for step in range(19)])
        assert all(found[rank].tobytes() == expected.tobytes() for rank in range(3))


def test_one_slot_fewer_loses_words(folder: Path) -> None:
    """Also shows that the twin's schedules are unkind enough to find such a mistake."""
    for delay in (0, 1):
        _, text = exchange(folder, 3, random_values(3, 20, 2), delay=delay, mode=5, seed=1)
        assert text, "no wait ran out of time, though a word was overwritten before it was read"


def test_every_bit_pattern_is_gathered(folder: Path) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (3, 4, 40), dtype=np.uint32)
    bits[:, :, :6] = (0, 0x80000000, 1, 0x7F800001, 0xFFFFFFFF, 0xFF800000)
    found, _ = exchange(folder, 3, bits.view(np.float32), delay=0, mode=1, seed=3)
    for rank in range(3):
        assert found[rank].view(np.uint32).reshape(4, 3, 40).transpose(1, 0, 2).tobytes() == bits.tobytes()


def test_a_silent_rank_is_named_within_the_limit(folder: Path) -> None:
    _, text = exchange(folder, 3, random_values(3, 5, 40), delay=0, mode=3, seed=4)
    records = [[int(word) for word in line.split()] for line in text.splitlines()]
    assert [record[:2] for record in records] == [[0, 0], [1, 1]]
    for _, _, mailbox, slot, peer, num_missing, wanted, seen, is_late in records:
        assert (mailbox, slot, peer, wanted, seen, is_late) == (5, 1, 2, 5, 3, 1)
        assert num_missing in (8, 32), "the words of the warp that waited"


def test_an_abort_ends_waits_without_a_record(folder: Path) -> None:
    _, text = exchange(folder, 3, random_values(3, 2, 8), delay=0, mode=4, seed=5)
    records = [[int(word) for word in line.split()] for line in text.splitlines()]
    assert [record[0] for record in records] == [0, 1], "the ranks that were not silent"
    assert not any(any(record[1:]) for record in records)


@pytest.mark.parametrize(
    "shape",
    [ChainShape(4, 72, 24, False), ChainShape(2, 64, 32, True, 3)],
    ids=["owners", "everyone"],
)
def test_chains_have_the_bits_of_their_definition(folder: Path, shape: ChainShape) -> None:
    program = built(folder, "chain", "chain_shape.cuh", shape.header())
    bias = random_values(shape.num_ranks, 1, shape.length)[:, 0]
    bias.tofile(folder / "in.bin")
    expected = chain_totals(bias, 8, shape.shift if shape.everyone else 0)
    for seed in range(3):
        run(program, seed, 4, 2, folder / "in.bin", folder / "out.bin")
        found = np.fromfile(folder / "out.bin", np.float32).reshape(shape.num_ranks, shape.length)
        assert all(found[rank].tobytes() == expected.tobytes() for rank in range(shape.num_ranks))


def test_every_thread_block_finds_the_same_best_candidate(folder: Path) -> None:
    num_ranks, num_ctas, rows = 4, 3, 24  # more stores than a warp has threads, as of the 2B shape
    program = built(folder, "handoff", "handoff_shape.cuh", handoff_header(num_ranks, num_ctas, rows))
    run(program, 11, 6, folder / "out.bin")
    found = np.fromfile(folder / "out.bin", np.uint32).reshape(num_ranks, 6, num_ctas, 4)
    expected = handoff_results(num_ranks, num_ctas, rows, range(1, 7))
    for rank in range(num_ranks):
        for cta in range(num_ctas):
            assert np.array_equal(found[rank, :, cta], expected), (rank, cta)


@pytest.mark.parametrize("mode", [0, 1, 2, 4], ids=["words", "candidates", "quads", "several vectors"])
def test_a_wait_that_ended_well_is_no_reason_to_stop_later(folder: Path, mode: int) -> None:
    """Its note is taken back: a watchdog that found it in a pause between requests would abort a healthy engine."""
    program = built(folder, "notes", "ranks.cuh", ranks_header(2))
    for seed in range(3):
        assert run(program, seed, mode).split() == ["1", "1", "1"]


def test_a_wait_that_did_not_end_well_says_so(folder: Path) -> None:
    noted, ended_well, _ = run(built(folder, "notes", "ranks.cuh", ranks_header(2)), 1, 3).split()
    assert (noted, ended_well) == ("1", "0")
