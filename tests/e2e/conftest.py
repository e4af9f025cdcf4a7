"""Models and engines of the end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, engine_session
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint

NUM_ENDLESS = 32_000  # of `tiny_model`: more tokens than any machine decodes while a test looks at the stream
NUM_PLAIN_TOKENS = 96
PLAIN_PROMPT = ("--prompt-ids=17,300,42,7,99,1024", "--ignore-eos", "--json", f"--max-tokens={NUM_PLAIN_TOKENS}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer: random weights, four lanes, a context long enough to be interrupted in."""
    spec = ModelSpec(
        hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=64, vocab_size=320,
        max_context=32_768, num_lanes=4, delay=1, sliding_window=16, window_layers=(0, 1),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, spec, random_tensors(spec, seed=1))
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled demo model."""
    return Path(str(resources.files("kog_dist"))) / "models" / "demo"


@pytest.fixture(scope="session")
def plain_tokens(demo_model: Path) -> list[int]:
    """The tokens that every launcher must give for `PLAIN_PROMPT`: those of one rank that kog-launch started by itself."""
    with engine_session() as made:
        done = made.run("kog_dist.launch.cli", [str(demo_model), "--ranks=1", "--launcher=local", *PLAIN_PROMPT])
    assert done.returncode == 0, done.stderr
    return tokens_in(done.stdout)


def tokens_in(output: str) -> list[int]:
    """Token ids of the answer to `PLAIN_PROMPT` that some command printed among other lines."""
    line = next(line for line in output.splitlines() if line.startswith("{"))
    ids: list[int] = json.loads(line)["token_ids"]
    assert len(ids) == NUM_PLAIN_TOKENS
    return ids


def without_progress(errors: str) -> str:
    """What a command has said on stderr, less the lines that kog-launch adds while a loaded machine starts an engine slowly."""
    return "".join(line for line in errors.splitlines(True) if not line.startswith("kog-launch: waiting for "))


def lines_of(errors: str) -> list[str]:
    """The lines of our commands among what others, such as mpirun, have said on stderr; less the progress of start-up."""
    return [line for line in without_progress(errors).splitlines() if line.startswith(("kog-", "Error"))]


def check_refusal(code: int, sentence: str, seen_code: int, out: str, err: str) -> None:
    """What a refused command has said is one sentence, but for how to use it."""
    assert seen_code == code, err
    assert sentence in err
    assert "Traceback" not in err
    lines = [line for line in without_progress(err).splitlines() if not line.startswith(("Usage:", "usage:", "Try "))]
    assert len([line for line in lines if line.strip()]) == 1, err
    assert out == ""


@pytest.fixture
def session() -> Iterator[EngineSession]:
    """Engines and commands of one test, in a runtime folder of its own; whatever they leave is killed."""
    with engine_session() as made:
        yield made
