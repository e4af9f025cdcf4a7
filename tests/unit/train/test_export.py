"""From source to a model folder: prepare, a few steps, export, evaluation; and the bundled demo model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from typer.testing import CliRunner

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams
from kog_dist.train.__main__ import app
from kog_dist.train.completions import complete_functions, load_module
from kog_dist.train.corpus import folder_project
from kog_dist.train.export import export
from kog_dist.train.held_out import load_functions
from kog_dist.train.licences import evaluate
from kog_dist.train.prepare import prepare
from kog_dist.train.run import Run
from kog_dist.train.settings import RunSettings
from kog_dist.train.specs import demo_spec, nano_spec
from kog_dist.train.start import start_weights, write_start

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
SETTINGS = RunSettings(num_steps=4, batch=4, time=64, learning_rate=1e-2, adam_learning_rate=1e-2, warmup_steps=2)
DEMO = Path(__file__).parents[3] / "kog_dist" / "models" / "demo"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for name, numbers in (("many", range(40)), ("kept", range(40, 43))):
        (root / name).mkdir()
        for number in numbers:
            (root / name / f"file_{number}.py").write_text(FILE.format(n=number), encoding="utf-8")
    projects = [folder_project(root / name, "MIT") for name in ("many", "kept")]
    prepare(projects, {}, root / "out", held_out=["kept"], vocab_size=320, num_processes=1)
    return root / "out"


@pytest.fixture(scope="module")
def exported(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and the state that it came from."""
    root = tmp_path_factory.mktemp("exported")
    run = Run(nano_spec(), SETTINGS, prepared)
    run.train(report=lambda line: None, report_every=4, save_to=root / "state")
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


def test_exported_folder_is_whole(exported: tuple[Path, Path], prepared: Path, tmp_path: Path) -> None:
    model, _ = exported
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    assert tokenizer.eos_ids == (0,)
    card = (model / "README.md").read_text()
    assert re.search(r"^\| MIT \| \*\*kept\*\* local \(\d+\), many local \(\d+\) \|$", card, re.M), card
    assert "4 steps, 1,024 tokens" in card
    assert f"`{json.loads((prepared / 'sources.json').read_text())['digest']}`" in card
    assert "bits per byte" in card
    with pytest.raises(CheckpointError, match=r"no progress\.json"):
        export(tmp_path, model / "tokenizer.json", model / "config.json", tmp_path / "out")


def test_sampling_completions_repeats_itself_with_the_seed(exported: tuple[Path, Path], prepared: Path) -> None:
    functions = load_functions(prepared / "held_out_functions.json")[:5]
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
        for number in range(1, 5):
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
    assert judged["num_tested"] == 4  # the functions at the top of the files; methods have no tests
    call(
        "export", "--state", state, *tokenizer, "--sources", f"{data}/sources.json", "--out", model,
        "--evaluation", str(tmp_path / "evaluation.json"),
    )  # fmt: skip
    card = (Path(model) / "README.md").read_text()
    assert "parse** with `ast`" in card
    assert "Of 4 functions with unit tests" in card
    open_checkpoint(Path(model)).verify_all()
    start = str(tmp_path / "start")
    healed = call("heal", "--model", delay_0(Path(model), tmp_path), "--delay", "2", "--out", start, "--data", data, "--affinity")
    assert 0 < float(str(healed["share_before"])) <= float(str(healed["share_after"])) <= 1
    assert call("run", "--data", data, "--state", str(tmp_path / "healed"), "--start", start, *shape[2:])["finished"] is True


def delay_0(model: Path, folder: Path) -> str:
    spec, tensors = start_weights(model)
    write_start(folder / "delay_0", replace(spec, delay=0), tensors)
    return str(folder / "delay_0")


def test_the_bundled_demo_model_is_what_its_card_says() -> None:
    checkpoint = open_checkpoint(DEMO)
    checkpoint.verify_all()
    assert checkpoint.spec == demo_spec()
    assert checkpoint.spec.num_parameters == 16_421_760
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 32 * 2**20
    assert all(file.stat().st_size <= 16 * 2**20 for file in DEMO.iterdir())
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    tokenizer.check_fits(checkpoint.spec.vocab_size)
    rows = [line.split("|") for line in (DEMO / "README.md").read_text().split("\n") if line.startswith("| ")][1:]
    assert sum(len(row[2].split(", ")) for row in rows) == 186
    assert all(evaluate(row[1].strip()) == row[1].strip() for row in rows)


@torch.no_grad()
def test_the_bundled_demo_model_knows_python() -> None:
    module, tokenizer = Laneformer.from_checkpoint(DEMO), Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    text = "import json\n\n\ndef read_json(path):\n    with open(path) as file:\n        return json.load(file)\n"
    ids = torch.tensor([tokenizer.encode(text)])
    loss = torch.nn.functional.cross_entropy(module(ids)[0, :-1], ids[0, 1:])
    assert float(loss) < 3.0  # untrained: ln 4096 = 8.3


@torch.no_grad()
def test_the_engine_chooses_the_tokens_of_the_training_code() -> None:
    """With keys and values rounded to float16; with bfloat16 two tokens that are almost equally likely may change places."""
    module, tokenizer, checkpoint = Laneformer.from_checkpoint(DEMO), Tokenizer.from_folder(DEMO), open_checkpoint(DEMO)
    assert tokenizer is not None
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, checkpoint.rank_weights(range(8)), None, kv_dtype="float16")
    for text in ("def gcd(a, b):\n    while b:\n", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n"):
        prompt = tokenizer.encode(text)
        ids, num_known = list(prompt), len(prompt)
        engine.use_cache(0, 0, 0)
        for position in range(num_known + 31):
            token_id = engine.step(ids[position], position, SamplingParams()).token_id
            ids += [token_id] if position >= num_known - 1 else []
        best = module(torch.tensor([ids[:-1]]))[0, num_known - 1 :].argmax(-1)
        assert best.tolist() == ids[num_known:]
