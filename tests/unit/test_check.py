"""`kog-launch --check` accepts what a start accepts, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.config import LaunchConfig
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check as check_plan
from kog_dist.errors import CheckpointError, ConfigError, KogError, LaunchError
from kog_dist.gateway.model_files import read_model
from kog_dist.launch import flags, inspection
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.manifest import MANIFEST_NAME
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from kog_dist.model.template_sandbox import make_environment
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime import memfd
from kog_dist.workers.coordinator.model_folder import ModelFolder
from tests.fuzz.json_mutation import mutate_json

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
RANKS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with all the files that a published one has, and no manifest."""
    write_tiny_model(tmp_path)
    write_checkpoint(tmp_path, TINY, random_tensors(TINY, seed=1), max_shard_bytes=40_000, manifest=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256], "temperature": 0.5, "top_k": 3}))
    return tmp_path


@pytest.fixture
def template_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are compiled here: hundreds of processes would take minutes."""

    def compile_it(template: ChatTemplate) -> None:
        try:
            make_environment().from_string(template.source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template cannot be used: {error}") from None

    monkeypatch.setattr(ChatTemplate, "check", compile_it)
    monkeypatch.setattr(ChatTemplate, "facts", property(compile_it))


def start(folder: Path) -> None:
    """What the processes of an engine read before it is ready: launcher, ranks, coordinator, gateway."""
    LaunchConfig(model=str(folder), device="cpu", ranks=RANKS)
    for rank in range(RANKS):
        checkpoint = open_checkpoint(folder)
        checkpoint.rank_weights(checkpoint.spec.lanes_of_rank(rank, RANKS))
        check_plan(make_plan(checkpoint.spec, RANKS))
    ModelFolder.from_folder(folder, "model")
    read_model(folder)


def check(folder: Path, *, deep: bool = False) -> str:
    return inspection.check(LaunchConfig(model=str(folder), device="cpu", ranks=RANKS), deep=deep)


def refuses(action: Callable[[], object]) -> str:
    try:
        action()
    except KogError as error:
        return str(error)
    return ""


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def mutants(folder: Path, each: int) -> Iterator[str]:
    """The folder, damaged in one file at a time: values, structure, bytes, length, absence."""
    rng = random.Random(3)
    for path in sorted(folder.iterdir()):
        intact = path.read_bytes()
        for number in range(each):
            changed = mutate_json(intact, rng) if path.suffix == ".json" and number % 3 else None
            if changed is None:
                flipped, head = bytearray(intact), min(len(intact), 3000)
                flipped[rng.randrange(head)] ^= 1 << rng.randrange(8)
                changed = bytes(flipped) if number % 4 else intact[: rng.randrange(len(intact))]
            path.write_bytes(changed)
            yield f"{path.name} {number}"
        path.unlink()
        yield f"{path.name} removed"
        path.write_bytes(intact)


@pytest.mark.usefixtures("template_in_process")
def test_the_check_refuses_every_mutant_that_a_start_refuses(folder: Path) -> None:
    start(folder)
    check(folder, deep=True)
    refused, accepted = 0, 0
    for mutant in mutants(folder, each=60):
        why = refuses(lambda: start(folder))
        assert bool(refuses(lambda: check(folder, deep=True))) == bool(why), f"{mutant}: {why}"
        refused, accepted = refused + bool(why), accepted + (not why)
    assert refused > 200
    assert accepted > 20


def test_the_check_opens_tokenizer_template_and_sampling(folder: Path) -> None:
    assert "with tokenizer" in check(folder)
    for name, text, cause in (
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{% for %}"}), "chat template cannot be used"),
        ("generation_config.json", json.dumps({"top_p": 7}), "top_p must be between"),
        ("generation_config.json", json.dumps({"eos_token_id": 257}), "eos_token_id 257"),
    ):
        intact = (folder / name).read_text()
        (folder / name).write_text(text)
        assert cause in refuses(lambda: check(folder))
        (folder / name).write_text(intact)
    check(folder)


def test_only_the_deep_check_reads_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    with path.open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x80\x7f")
    check(folder)
    assert "is not finite" in refuses(lambda: check(folder, deep=True))
    arguments = ["--device", "cpu", "--check", str(folder)]
    assert (flags.run(arguments), flags.run([*arguments, "--deep"])) == (0, 3)
    assert "is not finite" in capsys.readouterr().err
    assert flags.run(["--deep", str(folder)]) == ConfigError.exit_code


def test_the_deep_check_compares_hashes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / SINGLE_NAME
    flipped = bytearray(path.read_bytes())
    flipped[-2] ^= 1
    path.write_bytes(flipped)
    check(tmp_path)
    assert "differs from its SHA-256" in refuses(lambda: check(tmp_path, deep=True))


def test_what_memory_rules_out_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available_bytes", lambda: 1000)
    assert "CPU ranks would keep" in refuses(lambda: check(folder))
    assert flags.run(["--device", "cpu", "--check", str(folder)]) == LaunchError.exit_code


# ---- what was accepted without a manifest ----
def test_a_tokenizer_with_dropout_is_refused(folder: Path) -> None:
    parsed = json.loads((folder / "tokenizer.json").read_text())
    for dropout, accepted in ((0.1, False), (1, False), ("x", False), (None, True), (0, True)):
        parsed["model"]["dropout"] = dropout
        (folder / "tokenizer.json").write_text(json.dumps(parsed))
        assert ("dropout" in refuses(lambda: check(folder))) is not accepted


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_beyond_the_vocabulary_is_refused(folder: Path, name: str) -> None:
    (folder / "generation_config.json").write_text("{}")
    edited(folder / name, eos_token_id=[2, TINY.vocab_size])
    for without_tokenizer in (False, True):
        if without_tokenizer:
            (folder / "tokenizer.json").unlink()
        assert f"eos_token_id {TINY.vocab_size}" in refuses(lambda: ModelFolder.from_folder(folder, "model"))
    edited(folder / name, eos_token_id=[2, TINY.vocab_size - 1])
    assert ModelFolder.from_folder(folder, "model").eos_ids == (2, TINY.vocab_size - 1)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX_NAME, MANIFEST_NAME]
)
def test_keys_given_twice_are_refused_in_every_file(folder: Path, name: str) -> None:
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    path = folder / name
    body = path.read_text() if path.exists() else '{"format": "x"}'
    key = next(iter(json.loads(body)))
    path.write_text(body.strip()[:-1] + f', "{key}": null}}')
    assert f"key '{key}' stands twice" in refuses(lambda: check(folder))
