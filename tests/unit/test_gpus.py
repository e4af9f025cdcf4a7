"""GPUs of a machine, what CUDA shows of them, and what --gpus picks: no GPU is needed for any of it."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.hardware import nvml
from kog_dist.hardware.gpus import Gpu, Inventory, inventory_from, read_inventory
from kog_dist.hardware.selection import GpuRequest, select_gpus
from kog_dist.hardware.visible import Visible, visible_gpus
from kog_dist.system import python_child
from tests.unit.fake_nvml import FakeGpu, FakeNvml, node

UUIDS = ("GPU-1a2b0000", "GPU-1a2c0000", "GPU-77aa0000", "GPU-90000000")
GPUS = tuple(Gpu(index, uuid, "NVIDIA H200", f"0000:{index:02x}:00.0", (9, 0)) for index, uuid in enumerate(UUIDS))
INVENTORY = Inventory(GPUS)


# --- what is there --------------------------------------------------------------------------------------------------------------


def test_an_inventory_has_what_the_rest_needs() -> None:
    inventory = inventory_from(node())
    assert inventory.findings == ()
    assert [gpu.index for gpu in inventory.gpus] == list(range(8))
    fifth = inventory.gpus[5]
    assert (fifth.bus_id, fifth.compute, fifth.has_mig) == ("0000:15:00.0", (9, 0), False)
    assert fifth.cpus == frozenset(range(48, 96))
    assert fifth.peak_bytes_s == pytest.approx(4.917e12, rel=1e-3)


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    def lose_the_second(index: int, gpu: FakeGpu) -> None:
        gpu.is_lost = index == 1

    inventory = inventory_from(node(3, lose_the_second))
    assert [gpu.index for gpu in inventory.gpus] == [0, 2]
    assert inventory.findings == ("GPU 1 does not answer (NVML error 15)",)


def test_what_a_gpu_does_not_tell_is_left_open() -> None:
    def say_nothing_of_peers(_index: int, gpu: FakeGpu) -> None:
        gpu.peer_status = None

    assert inventory_from(node(2, say_nothing_of_peers)).apart == {}
    gpu = FakeGpu("GPU-0", mig=None, cpu_words=None, clock_mhz=None, bus_bits=None, bus=0xFF)
    (found,) = inventory_from(FakeNvml([gpu])).gpus
    assert (found.has_mig, found.cpus, found.peak_bytes_s) == (False, frozenset(), 0.0)


@pytest.mark.parametrize(
    ("code", "words"), [(12, "no NVIDIA driver"), (9, "no NVIDIA driver"), (18, "restart the machine"), (4, "NVML error 4")]
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=code))
    assert words in read_inventory().findings[0]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert read_inventory() == Inventory((), ("the NVIDIA driver has no GPU",))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in read_inventory().findings[0]


def test_a_driver_that_hangs_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setitem(sys.modules, "pynvml", node(2))
    monkeypatch.setattr(python_child, "command", lambda _: python_child.interpreter("-c", "print(flush=True); input()"))
    assert len(read_inventory().gpus) == 2
    monkeypatch.setattr(python_child, "command", lambda _: python_child.interpreter("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(nvml, "ANSWER_S", 0.05)
    inventory = read_inventory()
    assert (inventory.gpus, inventory.driver_hangs) == ((), True)
    assert "the NVIDIA driver has not answered for 0.05 s" in inventory.findings[0]
    with pytest.raises(LaunchError, match=r"--gpus 2: the NVIDIA driver has not answered.*--device cpu"):
        select_gpus(GpuRequest.parse("2"), visible_gpus((), {}), inventory)


def test_the_probe_of_a_driver_fits_the_binding() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    done = subprocess.run(
        python_child.command(nvml._PROBE), input="", capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_the_probe_of_a_driver_imports_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "pynvml.py").write_text("open('marker', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setitem(sys.modules, "pynvml", node(2))
    assert len(read_inventory().gpus) == 2
    assert not (tmp_path / "marker").exists()


def test_nvml_is_shut_down_again(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = node(2)
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    assert len(read_inventory().gpus) == 2
    assert binding.num_sessions == 0


def test_the_real_binding_has_every_call_of_the_fake() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in dir(FakeNvml):
        if name.lower().startswith("nvml"):
            assert hasattr(pynvml, name), name
            if name.isupper():
                assert getattr(pynvml, name) == getattr(FakeNvml, name), name


# --- what CUDA shows ------------------------------------------------------------------------------------------------------------


def shown(mask: str | None, gpus: Sequence[Gpu] = GPUS, **environ: str) -> list[int]:
    variables = dict(environ) if mask is None else {"CUDA_VISIBLE_DEVICES": mask, **environ}
    return [gpu.index for gpu in visible_gpus(gpus, variables).gpus]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 2 , 0", [2, 0]),
        ("1,9,0", [1]),  # stops at an entry that names nothing
        ("1,-1,0", [1]),
        ("-1", []),
        ("1,,0", [1]),
        ("NoDevFiles", []),
        ("1,1", []),  # twice the same: nothing
        ("1gpu,2", [1, 2]),
        ("+1,-0", [1, 0]),
        ("GPU-77,GPU-1a2b", [2, 0]),
        ("GPU-1a2,GPU-77", []),  # fits two
        ("GPU-77,GPU-1a2", [2]),
        ("GPU-77,GPU-77aa", []),
        ("GPU-77,0", [2]),
        ("GPU-77, GPU-90", [2]),  # a blank does not belong to a UUID
        ("gpu-77", []),
        ("0,GPU-77", [0]),
        ("MIG-0000", []),
        ("1," + "9" * 5000, [1]),
    ],
)
def test_the_mask_is_read_as_the_driver_reads_it(mask: str | None, expected: list[int]) -> None:
    assert shown(mask) == expected


def test_pytorch_reads_random_masks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's reading of the variable is checked against the driver in its own tests."""
    import torch.cuda as oracle

    generator = random.Random(5)
    words = [*"01239", "-1", "", " 1", "2x", "x", "+2", "GPU-1a2b", "GPU-1a2", "GPU-77aa", "GPU-9", "GPU-f", " GPU-9", "GPU-"]
    for _ in range(3000):
        mask = ",".join(generator.choices(words, k=generator.randint(1, 4)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        entries: list[Any] = list(oracle._parse_visible_devices())
        if entries and isinstance(entries[0], str):
            expected = oracle._transform_uuid_to_ordinals(entries, list(UUIDS))
        else:
            expected = entries[: next((place for place, number in enumerate(entries) if number >= len(GPUS)), len(entries))]
        assert shown(mask) == expected, mask


def test_numbers_need_a_known_order() -> None:
    mixed = (*GPUS[:1], dataclasses.replace(GPUS[1], name="NVIDIA L4"))
    assert shown(None, mixed) == [0, 1]
    assert shown("1", mixed) == []
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible_gpus(mixed, {"CUDA_VISIBLE_DEVICES": "1"}).why
    assert shown("1", mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    assert shown("GPU-1a2c", mixed) == [1]


# --- what --gpus picks ----------------------------------------------------------------------------------------------------------


def picked(text: str, mask: str | None = None, inventory: Inventory = INVENTORY) -> list[int]:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return [gpu.index for gpu in select_gpus(GpuRequest.parse(text), visible_gpus(inventory.gpus, environ), inventory)]


@pytest.mark.parametrize(
    ("text", "mask", "expected"),
    [
        ("2", None, [0, 1]),
        ("all", None, [0, 1, 2, 3]),
        ("0,2", None, [0, 2]),
        ("3,0", None, [3, 0]),
        ("2,", None, [2]),
        ("GPU-77aa0000", None, [2]),
        ("gpu-9", None, []),  # the prefix is written as nvidia-smi writes it
        ("GPU-9,0,GPU-77", None, [3, 0, 2]),
        ("GPU-1A2B", None, [0]),
        ("all", "3,1", [3, 1]),
        ("1", "3,1", [3]),
        ("1,", "3,1", [1]),
        ("GPU-1a2c", "3,1", [1]),
    ],
)
def test_what_is_picked(text: str, mask: str | None, expected: list[int]) -> None:
    if not expected:
        with pytest.raises(ConfigError):
            picked(text, mask)
    else:
        assert picked(text, mask) == expected


@pytest.mark.parametrize(
    "text", ["", "  ", ",", "two", "1.5", "-1", "0", "1,-1", "GPU-", "0,0", "GPU-1,GPU-1", "MIG-1", "²", "9" * 5000]
)
def test_what_is_no_request(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        GpuRequest.parse(text)


@pytest.mark.parametrize(
    ("text", "mask", "message"),
    [
        ("5", None, "--gpus 5: 4 GPUs are visible; use --device cpu"),
        ("4,", None, "there is no GPU 4: 4 GPUs are visible; kog-doctor lists"),
        ("1,", "3", r"there is no GPU 1: 1 GPU is visible \(CUDA_VISIBLE_DEVICES=3 shows 1 of 4\); kog-doctor"),
        ("1", "", "no GPUs are visible .CUDA_VISIBLE_DEVICES= hides all 4"),
        ("all", "MIG-5", "MIG"),
        ("GPU-1a2", None, "GPU-1a2 fits 2 GPUs; give more of the UUID"),
        ("GPU-5", None, "no GPU has a UUID that starts with GPU-5: 4 GPUs are visible; .* --device cpu"),
        ("GPU-77", "0", "GPU 2 .* is hidden: CUDA_VISIBLE_DEVICES=0 shows 1 of 4"),
    ],
)
def test_what_is_not_there(text: str, mask: str | None, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        picked(text, mask)


def test_the_same_gpu_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names GPU 0 .* twice"):
        picked("0,GPU-1a2b")


def test_split_gpus_are_left_alone() -> None:
    split = Inventory((dataclasses.replace(GPUS[0], has_mig=True), *GPUS[1:]))
    assert picked("2", None, split) == [1, 2]
    assert picked("all", None, split) == [1, 2, 3]
    with pytest.raises(LaunchError, match=r"4 GPUs are visible \(1 split into MIG instances, which are left alone\)"):
        picked("4", None, split)
    with pytest.raises(LaunchError, match=r"GPU 0 .* is split into MIG instances"):
        picked("0,", None, split)


def test_without_gpus_the_reason_is_said() -> None:
    nothing = Inventory((), ("this machine has no NVIDIA driver",))
    with pytest.raises(LaunchError, match="this machine has no NVIDIA driver"):
        select_gpus(GpuRequest.parse("1"), Visible(()), nothing)
