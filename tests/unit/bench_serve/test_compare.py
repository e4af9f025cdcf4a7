"""Two results side by side: what is a difference, what is noise, what cannot be compared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.compare import differences, ratios, read_result, run
from kog_dist.errors import ConfigError


def result(*, factor: float = 1.0, seed: int = 1, count: int = 30, **changes: Any) -> dict[str, Any]:
    """A made-up result: answers of 21 tokens, 1 ms apart with 10% noise, `factor` times slower."""
    source = random.Random(seed)
    itls = [[0.001 * factor * source.uniform(0.9, 1.1) for _ in range(20)] for _ in range(count)]
    ttfts = [0.01 * factor * source.uniform(0.8, 1.2) for _ in range(count)]
    made = {
        "model_id": "m", "backend": "openai", "num_prompts": count, "request_rate": "inf", "burstiness": 1.0,
        "max_concurrency": 1, "configuration": {"output_len": 21, "seed": 0}, "machine": {"cpu": "x", "cores": 2},
        "ttfts": ttfts, "itls": itls,
        "latencies": [ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)], "output_lens": [21] * count,
        "input_lens": [5] * count, "errors": [""] * count,
    }  # fmt: skip
    return made | changes


def write(path: Path, made: dict[str, Any]) -> Path:
    path.write_text(json.dumps(made))
    return path


def test_equal_servers_are_within_noise() -> None:
    lines = ratios(result(seed=1), result(seed=2))
    assert [line.name for line in lines] == ["ttft", "tpot", "p99 itl of an answer", "e2el", "tokens/s of one reader"]
    assert {line.verdict for line in lines} == {"within noise"}
    for line in lines:
        assert line.low is not None
        assert line.high is not None
        assert line.low < line.ratio < line.high


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "slower"), (0.8, "faster")])
def test_a_difference_is_seen_in_both_directions(factor: float, verdict: str) -> None:
    lines = {line.name: line for line in ratios(result(), result(factor=factor, seed=2))}
    assert {line.verdict for line in lines.values()} == {verdict}
    assert lines["tpot"].ratio == pytest.approx(factor, rel=0.03)
    assert lines["tokens/s of one reader"].ratio == pytest.approx(1 / factor, rel=0.03)
    expected = 20.0 if verdict == "slower" else 0.0
    assert lines["tpot"].slower_percent == pytest.approx(expected, abs=3)
    assert lines["tokens/s of one reader"].slower_percent == pytest.approx(expected, abs=3)


def test_the_same_seed_gives_the_same_interval() -> None:
    first, second = result(), result(seed=2)
    assert ratios(first, second, seed=3) == ratios(first, second, seed=3)
    assert ratios(first, second, seed=3) != ratios(first, second, seed=4)


def test_few_requests_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = result(count=3, factor=2.0)
    assert {line.verdict for line in ratios(result(count=3), few)} == {"too few requests to say"}
    assert run(write(tmp_path / "a", result(count=3)), write(tmp_path / "b", few), fail_if_slower=1.0, seed=0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"][0]["low"] is None


def test_other_configurations_are_said() -> None:
    other = result(max_concurrency=4, configuration={"output_len": 99, "seed": 0}, machine={"cpu": "y", "cores": 2})
    found = " / ".join(differences(result(), other))
    assert "max_concurrency is 1 and 4" in found
    assert "output_len is 21 and 99" in found
    assert "cpu is 'x' and 'y'" in found
    assert differences(result(), result(seed=2)) == []
    loads = [result(machine={"cpu": "x", "cores": 2, "load_1min": load}) for load in (0.1, 0.6, 0.7)]
    assert differences(loads[0], loads[1]) == []
    assert differences(loads[0], loads[2]) == ["the machine's load at the start is 0.1 and 0.7"]
    assert "the sum of output_lens is 630 and 600" in " ".join(differences(result(), result(output_lens=[20] * 30)))


@pytest.mark.parametrize(("limit", "passes"), [(None, True), (10.0, False), (30.0, True)])
def test_fail_if_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: float | None, passes: bool) -> None:
    paths = write(tmp_path / "a.json", result()), write(tmp_path / "b.json", result(factor=1.2, seed=2))
    assert run(*paths, fail_if_slower=limit, seed=0) is passes
    out = capsys.readouterr().out
    assert ("slower than A by more than 10%: ttft, tpot" in out) is not passes
    last = json.loads(out.splitlines()[-1])
    assert bool(last["too_slow"]) is not passes
    assert last["benchmark"] == "compare"


def test_failed_requests_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = result(seed=2)
    broken["errors"][3], broken["ttfts"][3], broken["itls"][3], broken["output_lens"][3] = "HTTP 429", 0.0, [], 0
    run(write(tmp_path / "a", result()), write(tmp_path / "b", broken), fail_if_slower=None, seed=0)
    assert "0 requests of A failed and 1 of B" in capsys.readouterr().out


def test_a_result_of_vllm_without_latencies_can_be_compared(tmp_path: Path) -> None:
    theirs = {name: value for name, value in result(seed=2).items() if name in ("ttfts", "itls", "output_lens", "errors")}
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(theirs, indent=1))
    assert len(ratios(result(), read_result(path))) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"), ("[]", "has no errors"), ('{"ttfts": []}', "--save-detailed"),
        ('{"errors": [""], "ttfts": [], "itls": [], "output_lens": []}', "damaged"),
        ('{"errors": ["x"], "ttfts": [0], "itls": [[]], "output_lens": [0]}', "no request that was answered"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_said(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_result(path)
