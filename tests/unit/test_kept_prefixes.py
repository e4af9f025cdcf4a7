"""Memory for the beginnings of earlier requests: what is asked for, what there is, and what is taken by default."""

from __future__ import annotations

import pytest

from kog_dist.config import LaunchConfig, parse_gib
from kog_dist.errors import ConfigError
from kog_dist.launch.kept_prefixes import kept_on_cpu, kept_on_gpus
from kog_dist.launch.target import plan_target
from kog_dist.runtime import memfd

GIB = 2**30


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available_bytes", lambda: 16 * GIB)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("auto", None), ("off", 0), ("0", 0), ("1.5", 3 * GIB // 2), ("4096", 4096 * GIB)]
)
def test_what_can_be_asked_for(text: str, num_bytes: int | None) -> None:
    assert parse_gib(text) == num_bytes


@pytest.mark.parametrize("text", ["-1", "4097", "nan", "inf", "4G", ""])
def test_what_cannot_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^prefix_cache must be a number of GiB up to 4096, off or auto, got "):
        LaunchConfig(prefix_cache=text)


def test_cpu_ranks_take_little_unless_told_otherwise() -> None:
    assert kept_on_cpu(LaunchConfig(), 1) == 64 << 20
    assert kept_on_cpu(LaunchConfig(prefix_cache="4"), 4) == 4 * GIB
    assert kept_on_cpu(LaunchConfig(prefix_cache="off", prefix_host="off"), 4) == 0


def test_cpu_ranks_refuse_what_they_cannot_have() -> None:
    with pytest.raises(ConfigError, match=r"^prefix_cache 5 does not fit: each of 4 CPU ranks .*16\.0 GiB of memory are free"):
        kept_on_cpu(LaunchConfig(prefix_cache="5"), 4)
    with pytest.raises(ConfigError, match=r"^prefix_host 1 is memory behind that of GPUs"):
        kept_on_cpu(LaunchConfig(prefix_host="1"), 1)
    with pytest.raises(ConfigError, match=r"^check_experts compares which experts are chosen, and demo has none; leave it out$"):
        plan_target(LaunchConfig(device="cpu", check_experts=True))


def test_gpus_give_a_quarter_of_what_is_free() -> None:
    assert kept_on_gpus(LaunchConfig(), 8 * GIB, 1) == (2 * GIB, 2 * GIB)
    assert kept_on_gpus(LaunchConfig(), 800 * GIB, 4) == (16 * GIB, GIB // 2)
    assert kept_on_gpus(LaunchConfig(), -GIB, 1) == (0, 0), "a model that just fits"
    assert kept_on_gpus(LaunchConfig(prefix_cache="off", prefix_host="8"), 8 * GIB, 1) == (0, 0)
    assert kept_on_gpus(LaunchConfig(prefix_cache="7", prefix_host="8"), 8 * GIB, 2) == (7 * GIB, 4 * GIB)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^prefix_cache 9 does not fit: 8\.0 GiB of a GPU are free beside the model; "):
        kept_on_gpus(LaunchConfig(prefix_cache="9"), 8 * GIB, 1)


def test_rings_of_positions_keep_none() -> None:
    assert kept_on_gpus(LaunchConfig(), 80 * GIB, 1, has_rings=True) == (0, 0)
    for name in ("prefix_cache", "prefix_host"):
        with pytest.raises(ConfigError, match=rf"^{name} 1 cannot be had where windowed layers keep a ring of positions"):
            kept_on_gpus(LaunchConfig(**{name: "1"}), 80 * GIB, 1, has_rings=True)  # type: ignore[arg-type]
