"""docs/operations/: dashboard, alerts, unit and container file ask only for what exists, and agree with one another."""

from __future__ import annotations

import json
import re
from configparser import ConfigParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from kog_dist import config
from kog_dist.errors import ConfigError
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.gateway.metrics import Metrics
from kog_dist.launch.outcome import EXIT_RANK_DIED
from kog_dist.rpc.messages import EngineState, ErrorCode, StatusReport

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "operations"
MANUAL = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
_METRIC = re.compile(r"\b(?:kog:|process_)[a-z0-9_]+")
_STRING = re.compile(r'"[^"]*"')


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Every sample's name with the names of its labels, of a gateway to which everything has happened."""
    metrics = Metrics("demo", max_context=64)
    metrics.engine_facts(EngineFacts(64, 1000, 1e9, "a data sheet"))
    metrics.request_started("/v1/completions")
    metrics.http_response("/v1/completions", 200)
    metrics.engine_report(
        StatusReport(
            EngineState.READY, "one", "demo", "b", 1, 1, ("ready",), (0.0,), 1.0, None, (), 4, 0, 0, 0, 0, 0, 0, 0,
            ("r0",), ("ready",), ("",), ("",), epochs_waited=(0,), waited_s=(0.0,),
        )
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"])


def alerts() -> list[dict[str, Any]]:
    text = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    found = [(f"{panel['title']} {target['refId']}", target["expr"]) for panel in panels() for target in panel.get("targets", ())]
    found += [(note["name"], note["expr"]) for note in dashboard["annotations"]["list"]]
    return found + [(rule["alert"], rule["expr"]) for rule in alerts()]


@pytest.mark.parametrize(("place", "expression"), expressions(), ids=[place for place, _ in expressions()])
def test_every_metric_and_label_exists(place: str, expression: str, labels: dict[str, set[str]]) -> None:
    names = _METRIC.findall(_STRING.sub('""', expression))
    assert names or expression.startswith("up{"), f"{place} asks for no metric of ours"
    for name in names:
        assert name in labels, f"{place}: there is no {name}"
    from_scrape = {"job", "instance"}
    known = set().union(*(labels[name] for name in names)) | from_scrape if names else from_scrape
    selectors = "".join(re.findall(r"\{([^}]*)\}", _STRING.sub('""', expression)))
    asked = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selectors))
    asked |= {word for group in re.findall(r"(?:by|without)\s*\(([^)]*)\)", expression) for word in re.findall(r"[a-z_]+", group)}
    assert asked <= known, f"{place}: no label {asked - known}"
    assert expression.count("(") == expression.count(")")


def test_what_expressions_compare_with_exists() -> None:
    codes, states = {str(code) for code in ErrorCode}, {*map(str, EngineState), "unreachable"}
    for place, expression in expressions():
        for value in re.findall(r'code=~?"([^"]+)"', expression):
            assert set(value.split("|")) <= codes, place
        for value in re.findall(r'engine_state\{[^}]*state=~?"([^"]+)"', expression):
            assert set(value.split("|")) <= states, place


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["description"].endswith(".") and panel["targets"])


def test_each_alert_says_what_to_do_about_it() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert f"### {rule['alert']}\n" in MANUAL, f"docs/operations.md does not explain {rule['alert']}"
    assert set(re.findall(r"^### (Kog\w+)$", MANUAL, re.M)) == set(names)


def test_all_metrics_are_in_the_manual(labels: dict[str, set[str]]) -> None:
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in labels if name.startswith("kog:")}
    families = {name for name in families if f"{name}_total" not in families}  # `_created` of a counter lacks its suffix
    documented = {f"kog:{name}" for name in re.findall(r"`([a-z0-9_]+)(?:\{[^`]*\})?`", MANUAL.split("## Metrics", 1)[1])}
    assert families <= documented, f"docs/operations.md lacks {sorted(families - documented)}"


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((FOLDER / "kog.service").read_text(encoding="utf-8"))
    return parser


def test_unit_does_not_cut_a_drain_short() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) >= config.LaunchConfig().shutdown_timeout + 10
    assert service["KillMode"] == "mixed"  # SIGTERM to the launcher alone: it drains
    assert service["User"] != "root"
    assert service["RestartPreventExitStatus"] == f"{ConfigError.exit_code} {EXIT_RANK_DIED}", "usage, and what was tried already"
    assert re.search(r"TimeoutStopSec.*?`shutdown_timeout` \+ 10", MANUAL, re.S)


def test_unit_and_container_start_a_command_that_exists() -> None:
    scripts = re.search(r"^\[project\.scripts\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert scripts is not None
    commands = {line.split(" =")[0] for line in scripts.group(1).splitlines() if " =" in line}
    assert Path(unit()["Service"]["ExecStart"].split()[0]).name in commands
    entry = re.search(r'^ENTRYPOINT \["([a-z-]+)"\]', (FOLDER / "Containerfile").read_text(encoding="utf-8"), re.M)
    assert entry is not None
    assert entry.group(1) in commands


def test_container_copies_all_folders_of_the_package_and_is_not_root() -> None:
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    links = {path.name for path in (ROOT / "kog_dist").iterdir() if path.is_symlink()}
    copied = set(re.findall(r"^COPY (\w+) \./", text, re.M))
    assert copied == links | {"kog_dist"}
    assert "--constraint constraints.txt" in text
    instructions = re.findall(r"^([A-Z]+) ", text, re.M)
    assert instructions.count("FROM") == 2
    assert re.search(r"^USER \d+", text, re.M), "a number, so that an orchestrator can see that it is not root"
    last = instructions[len(instructions) - instructions[::-1].index("FROM") :]
    assert all(not (one == "USER" and two == "RUN") for one, two in pairwise(last))


def test_unit_and_container_keep_device_programs_in_the_same_place() -> None:
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    unit_text = (FOLDER / "kog.service").read_text(encoding="utf-8")
    places = re.compile(r"\b(XDG_CACHE_HOME|CUPY_CACHE_DIR|HOME)=(\S+)")
    kept = dict(places.findall(unit_text))
    assert dict(places.findall(text.rpartition("FROM ")[2])) == kept
    assert set(kept) == {"XDG_CACHE_HOME", "CUPY_CACHE_DIR", "HOME"}
    folder = kept["XDG_CACHE_HOME"]
    assert re.search(rf"install -d -o kog -g kog -m 0700 .*{folder}$", text, re.M), "its user cannot write it"
    assert f":{folder}`" in MANUAL, "read-only, and no volume there"


def test_container_copies_what_exists() -> None:
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    sources = [name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M) for name in line.split()]
    assert {"pyproject.toml", "constraints.txt"} <= set(sources)
    assert all((ROOT / name).exists() for name in sources)
