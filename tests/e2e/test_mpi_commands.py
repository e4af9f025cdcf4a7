"""`mpirun -n N kog-launch` for one answer: the tokens of a plain engine, or one sentence. Nothing here is promised in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until
from tests.e2e.conftest import PLAIN_PROMPT, lines_of, tokens_in
from tests.multi.mpi_command import FLAVOURS, mpirun_or_skip

GONE_S = 20.0  # a loaded machine is slow

each_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


@each_flavour
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_tokens_are_those_of_a_plain_engine(
    session: EngineSession, demo_model: Path, plain_tokens: list[int], flavour: str, num_ranks: int
) -> None:
    session.starter = tuple(mpirun_or_skip(flavour, num_ranks))
    done = session.run("kog_dist.launch.cli", [str(demo_model), "--launcher=mpi", *PLAIN_PROMPT], timeout_s=100.0)
    assert done.returncode == 0, done.stderr
    assert tokens_in(done.stdout) == plain_tokens
    assert session.leftovers() == []


@each_flavour
def test_start_that_makes_no_engine_is_one_sentence(session: EngineSession, tiny_model: Path, flavour: str) -> None:
    for num_ranks, arguments, code, expected in (
        (3, [str(tiny_model)], 2, "kog-launch: 4 lanes cannot be spread over 3 ranks"),
        (2, [str(tiny_model), "--ranks=4"], 2, "kog-launch: --ranks 4 contradicts mpirun -n 2"),
        (2, [str(session.folder / "nothing")], 3, "kog-launch: MODEL "),
        (2, ["--nonsense"], 2, "Error: No such option: --nonsense"),
    ):
        session.starter = tuple(mpirun_or_skip(flavour, num_ranks))
        done = session.run("kog_dist.launch.cli", arguments)
        assert done.returncode == code
        (said,) = lines_of(done.stderr)
        assert said.startswith(expected)
        until(lambda: not session.leftovers(), GONE_S, lambda: f"left behind: {session.leftovers()}")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPICH started 2 processes, but mpi4py uses"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI started 2 processes, but mpi4py uses"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "start with srun --mpi=pmi2 or another entry of"),
        ({}, "--launcher mpi: no mpirun has started this process"),
    ],
    ids=["pmi", "pmi-other-rank", "open-mpi", "slurm", "alone"],
)
def test_mpirun_of_another_mpi_is_explained_once(
    session: EngineSession, tiny_model: Path, variables: dict[str, str], expected: str
) -> None:
    """Without what the variables stand for, mpi4py's library finds nobody else: N worlds of size 1."""
    pytest.importorskip("mpi4py")
    session.variables = variables
    done = session.run("kog_dist.launch.cli", [str(tiny_model), "--launcher=mpi"])
    assert done.returncode == (3 if expected else 0), done.stderr
    lines = lines_of(done.stderr)
    assert len(lines) == bool(expected), done.stderr
    assert all(line.startswith("kog-launch: ") and expected in line for line in lines), done.stderr
