"""Training a nano model on the CPU: it learns, repeats itself, resumes, is exported and judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from typer.testing import CliRunner

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.train.__main__ import app
from kog_dist.train.completions import complete_functions, load_module, summary
from kog_dist.train.corpus import folder_project
from kog_dist.train.export import export
from kog_dist.train.licences import evaluate
from kog_dist.train.muon import Muon, orthogonalise
from kog_dist.train.prepare import HeldOutFunction, prepare
from kog_dist.train.run import Run, RunSettings
from kog_dist.train.specs import demo_spec, named_spec, nano_spec

FILE = '''
def total_{n}(values, start={n}):
    """Sum of the values."""
    result = start
    for value in values:
        result += value
    return result


class Counter{n}:
    def count(self, values):
        """Count the values."""
        self.number = len(values)
        self.last = {n}
        return self.number
'''
SETTINGS = RunSettings(num_steps=12, batch=4, time=64, learning_rate=1e-2, adam_learning_rate=1e-2, warmup_steps=2)
DEMO = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for name, numbers in (("many", range(40)), ("kept", range(40, 46))):
        (root / name).mkdir()
        for number in numbers:
            (root / name / f"file_{number}.py").write_text(FILE.format(n=number), encoding="utf-8")
    projects = [folder_project(root / name, "MIT") for name in ("many", "kept")]
    prepare(projects, [], root / "out", held_out=["kept"], vocab_size=320, num_processes=1)
    return root / "out"


def silent(line: str) -> None:
    assert line


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.module.state_dict().items()}


def test_training_lowers_the_loss_and_repeats_itself(prepared: Path) -> None:
    runs = [Run(nano_spec(), SETTINGS, prepared) for _ in range(2)]
    before = runs[0].held_out_loss()
    for run in runs:
        assert run.train(report=silent, report_every=6)
    assert runs[0].losses == runs[1].losses
    assert [step for step, _ in runs[0].losses] == [6, 12]
    assert runs[0].held_out_losses[-1][1] < before - 0.5
    first, second = weights_of(runs[0]), weights_of(runs[1])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_equals_an_uninterrupted_one(prepared: Path, tmp_path: Path) -> None:
    whole = Run(nano_spec(), SETTINGS, prepared)
    whole.train(report=silent, report_every=4)
    pieces = Run(nano_spec(), SETTINGS, prepared)
    assert not pieces.resume(tmp_path)
    assert not pieces.train(call_seconds=0, report=silent, report_every=4)
    assert pieces.step_idx == 10  # the clock is looked at every ten steps
    pieces.save(tmp_path)
    rest = Run(nano_spec(), SETTINGS, prepared)
    assert rest.resume(tmp_path)
    assert rest.train(report=silent, report_every=4)
    assert rest.losses[:2] == whole.losses[:2]
    expected, got = weights_of(whole), weights_of(rest)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    with pytest.raises(ConfigError, match="holds a run with settings"):
        Run(nano_spec(), replace(SETTINGS, seed=1), prepared).resume(tmp_path)
    with pytest.raises(ConfigError, match="holds a run with spec"):
        Run(replace(nano_spec(), delay=2), SETTINGS, prepared).resume(tmp_path)


def test_learning_rate_warms_up_and_decays(prepared: Path) -> None:
    run = Run(nano_spec(), replace(SETTINGS, num_steps=100, warmup_steps=10, decay_share=0.5), prepared)
    factors = [run.learning_rate_factor(step) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9:51] == [1.0] * 42
    assert factors[75] == 0.5
    assert factors[99] == pytest.approx(0.02)


def test_missing_or_too_few_tokens_are_named(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run `python -m kog_dist.train prepare` first"):
        Run(nano_spec(), SETTINGS, tmp_path)
    with pytest.raises(ConfigError, match="too few for rows of 100000"):
        Run(nano_spec(), replace(SETTINGS, time=100_000), prepared)
    with pytest.raises(ConfigError, match="choose one of demo, nano"):
        named_spec("huge")


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0)) * 7
    for shaped in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3


def test_muon_moves_against_the_gradient_lane_by_lane() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4, 4))
    parameter.grad = torch.stack((torch.eye(4), -100 * torch.eye(4)))
    Muon([parameter], weight_decay=0.0).step(0.1)
    first, second = parameter.detach()
    assert torch.allclose(first, -second, atol=1e-3)  # the size of a lane's gradient does not matter
    assert torch.all(first.diagonal() < -0.02)


@pytest.fixture(scope="module")
def exported(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and the state that it came from."""
    root = tmp_path_factory.mktemp("exported")
    run = Run(nano_spec(), SETTINGS, prepared)
    run.train(report=silent, report_every=6)
    run.save(root / "state")
    export(root / "state", prepared / "tokenizer.json", prepared / "sources.json", root / "model")
    return root / "model", root / "state"


@torch.no_grad()
def test_exported_model_gives_the_logits_of_the_trained_weights(exported: tuple[Path, Path]) -> None:
    model, state = exported
    trained = load_module(None, state)
    for parameter in trained.parameters():
        parameter.copy_(parameter.bfloat16().float())
    open_checkpoint(model).verify_all()
    ids = torch.arange(1, 41)[None]
    opened = Laneformer.from_checkpoint(model)
    assert torch.equal(opened(ids), trained(ids))
    cache, token, greedy = KvCache(), ids, []
    for _ in range(8):
        token = opened(token, cache)[:, -1:].argmax(-1)
        greedy.append(int(token))
    assert greedy == [int(trained(torch.tensor([[*range(1, 41), *greedy[:n]]]))[0, -1].argmax()) for n in range(8)]


def test_exported_folder_is_whole(exported: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = exported
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    assert tokenizer.eos_ids == (0,)
    card = (model / "README.md").read_text()
    assert "| many | local | MIT | 40 |" in card
    assert "| kept | local | MIT | 6 |" in card
    assert "12 steps, 3,072 tokens" in card
    with pytest.raises(CheckpointError, match=r"no progress\.json"):
        export(tmp_path, model / "tokenizer.json", model / "config.json", tmp_path / "out")


class Scripted:
    """A tokenizer whose tokens are characters, for judging known continuations."""

    def encode(self, text: str) -> Scripted:
        self.ids = [ord(character) for character in text]
        return self

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def token_to_id(self, token: str) -> int:
        return 0


class Continuation(torch.nn.Module):
    """Writes a fixed text behind each prompt."""

    def __init__(self, texts: dict[str, str]) -> None:
        super().__init__()
        self.texts = texts
        self.cos = torch.zeros(1)
        self.rows: list[str] = []

    def forward(self, ids: torch.Tensor, cache: object) -> torch.Tensor:
        assert isinstance(cache, RowCache)
        cache.rows = [
            row + "".join(map(chr, piece)) for row, piece in zip(cache.rows or [""] * len(ids), ids.tolist(), strict=True)
        ]
        logits = torch.zeros(len(ids), 1, 128)
        for slot, row in enumerate(cache.rows):
            whole = next(prompt + text for prompt, text in self.texts.items() if (prompt + text).startswith(row)) + "\0" * 99
            logits[slot, 0, ord(whole[len(row)])] = 1.0
        return logits


class RowCache(KvCache):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.rows = [self.rows[int(row)] for row in rows]


def test_completions_end_at_the_margin_and_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "def a(x):\n    y = x\n": "    return y\n\n\ndef other(:\n",
        "def b(xs):\n    y = [\n": "        1,\n]\n    return y\n",  # ended by the end of the text
        "def c(x):\n    z = x\n": "    return (z\nnext\n",
        "def d(x):\n    q = x\n": "next = 1\n",
        "def e(x):\n    w = x\n": "    x = 1\n" * 40,
        "    def f(self, x):\n        v = x\n": "        return v\n\n    def g(self\n",
    }
    monkeypatch.setattr("kog_dist.train.completions.KvCache", RowCache)
    functions = []
    for prompt in texts:
        own = prompt.replace("    def", "def").replace("        v", "    v")
        source = own + ("    1]\n" if "[" in own else "    return 1\n")
        functions.append(HeldOutFunction("p", own, source))
    module = Continuation(texts)
    found = complete_functions(module, Scripted(), functions, temperature=0.0, max_new_tokens=60)  # type: ignore[arg-type]
    assert [(completion.ended, completion.parses) for completion in found] == [
        (True, True),
        (True, True),
        (True, False),
        (True, False),  # nothing of its own
        (False, True),  # cut at the limit, unfinished line dropped
        (True, True),
    ]
    assert found[0].text == "def a(x):\n    y = x\n    return y\n"
    assert found[4].text.endswith("    x = 1\n")
    assert found[5].text == "    def f(self, x):\n        v = x\n        return v\n"
    outcome = summary(found)
    assert (outcome["num_parsed"], outcome["num_ended_parsed"], outcome["num_cut_at_limit"]) == (4, 3, 1)
    assert outcome["parse_share"] == 0.6667


def test_sampling_completions_repeats_itself_with_the_seed(exported: tuple[Path, Path], prepared: Path) -> None:
    functions = [HeldOutFunction(**entry) for entry in json.loads((prepared / "held_out_functions.json").read_text())][:5]
    tokenizer = LibraryTokenizer.from_file(str(prepared / "tokenizer.json"))
    module = load_module(exported[0], None)
    outcomes = [
        complete_functions(module, tokenizer, functions, temperature=1.0, seed=seed, max_new_tokens=12) for seed in (1, 1, 2)
    ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]
    with pytest.raises(ConfigError, match="either a model folder or a training state"):
        load_module(None, None)


def test_commands_from_source_to_model_folder(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        for number in range(10):
            text = FILE.format(n=f"{number}{name}".replace("alpha", "1").replace("beta", "2"))
            (tmp_path / name / f"f{number}.py").write_text(text, encoding="utf-8")
    data, state, model = (str(tmp_path / name) for name in ("data", "state", "model"))

    def call(*arguments: str) -> dict[str, object]:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        parsed: dict[str, object] = json.loads(result.stdout.strip().split("\n")[-1])
        return parsed

    folders = ["--folder", str(tmp_path / "alpha"), "--folder", str(tmp_path / "beta"), "--licence", "MIT"]
    counts = call("prepare", "--out", data, *folders, "--held-out", "beta", "--vocab-size", "320", "--processes", "1")
    assert counts["vocab_size"] == 320
    shape = ["--model", "nano", "--steps", "4", "--batch", "2", "--time", "64", "--warmup-steps", "1"]
    assert call("run", "--data", data, "--state", state, *shape)["finished"] is True
    assert call("run", "--data", data, "--state", state, *shape)["step"] == 4  # nothing left to do
    tokenizer = ["--tokenizer", f"{data}/tokenizer.json"]
    judged = call(
        "evaluate", "--functions", f"{data}/held_out_functions.json", *tokenizer, "--state", state,
        "--count", "3", "--max-new-tokens", "8", "--out", str(tmp_path / "evaluation.json"),
    )  # fmt: skip
    assert judged["num_functions"] == 3
    call(
        "export", "--state", state, *tokenizer, "--sources", f"{data}/sources.json", "--out", model,
        "--evaluation", str(tmp_path / "evaluation.json"),
    )  # fmt: skip
    assert "parse** with `ast`" in (Path(model) / "README.md").read_text()
    open_checkpoint(Path(model)).verify_all()


def test_the_bundled_demo_model_is_what_its_card_says() -> None:
    checkpoint = open_checkpoint(DEMO)
    checkpoint.verify_all()
    assert checkpoint.spec == demo_spec()
    assert checkpoint.spec.num_parameters == 8_391_936
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 32 * 2**20
    assert all(file.stat().st_size <= 16 * 2**20 for file in DEMO.iterdir())
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    tokenizer.check_fits(checkpoint.spec.vocab_size)
    rows = [line.split("|") for line in (DEMO / "README.md").read_text().split("\n") if line.startswith("| ")][1:]
    assert len(rows) > 100
    assert all(evaluate(row[3].strip()) == row[3].strip() for row in rows)


@torch.no_grad()
def test_the_bundled_demo_model_knows_python() -> None:
    module, tokenizer = Laneformer.from_checkpoint(DEMO), Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    text = "import json\n\n\ndef read_json(path):\n    with open(path) as file:\n        return json.load(file)\n"
    ids = torch.tensor([tokenizer.encode(text)])
    loss = torch.nn.functional.cross_entropy(module(ids)[0, :-1], ids[0, 1:])
    assert float(loss) < 3.0  # untrained: ln 4096 = 8.3
