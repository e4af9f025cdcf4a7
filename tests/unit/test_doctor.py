"""kog-doctor: every check with good and bad news, bounded time, and a real run on whatever machine this is."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.decode.cpu import host_library
from kog_dist.doctor import (
    cgroups,
    cli,
    compilers,
    gpus,
    instances,
    limits,
    links,
    memory,
    mpi,
    network,
    processors,
    ray_state,
    software,
)
from kog_dist.doctor.report import CheckResult, Finding, Level, as_json, as_text, exit_code, ok, problem, warning
from kog_dist.doctor.runner import Check, run_checks
from kog_dist.errors import install
from kog_dist.runtime.instance import LEASE_FILE, Instance, is_stale
from tests.unit.fake_nvml import FakeGpu, FakeNvml, node

ROOT = Path(__file__).parents[2]


def shown(findings: Iterable[Finding]) -> str:
    """All findings as text: level and sentence of each."""
    return "\n".join(f"{finding.level}: {finding.text}" for finding in findings)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNvml], None]:
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


# --- report and runner ----------------------------------------------------------------------------------------------------------

ANSWERS = [
    CheckResult("First", "a", [ok("fine", number=1)]),
    CheckResult("First", "b", []),
    CheckResult("Second", "c", [warning("slow; do this"), problem("broken; do that")]),
]


def test_a_report_is_readable_by_people_and_programs() -> None:
    assert as_text(ANSWERS).splitlines() == [
        "First",
        "  ok      fine",
        "Second",
        "  warning slow; do this",
        "  problem broken; do that",
        "1 problem, 1 warning: no engine can start here until the problems are solved",
    ]
    assert as_text(ANSWERS[:1]).endswith("no problems, no warnings: an engine can start here")
    names = [f"package-{number} 1.{number}" for number in range(12)]
    long = as_text([CheckResult("First", "a", [ok(", ".join(names))])]).splitlines()
    assert max(map(len, long)) <= 110
    assert [line[:10] for line in long[1:3]] == ["  ok      ", " " * 10]
    assert " ".join(line[10:] for line in long[1:-1]) == ", ".join(names)
    found = json.loads(as_json(ANSWERS))
    assert found["ok"] is False
    assert found["findings"][0] == {"area": "First", "check": "a", "level": "ok", "text": "fine", "details": {"number": 1}}
    assert (exit_code(ANSWERS), exit_code(ANSWERS[:2])) == (1, 0)


def test_a_check_that_hangs_or_fails_costs_only_its_own_answer() -> None:
    release = threading.Event()

    def hang() -> Iterable[Finding]:
        release.wait(60)
        return [ok("late")]

    def fail() -> Iterable[Finding]:
        raise RuntimeError("boom\nsecond line")

    def lack() -> Iterable[Finding]:
        import no_such_package_of_anybody  # type: ignore[import-not-found]

        return [ok(str(no_such_package_of_anybody))]

    begin_s = time.monotonic()
    checks = [
        Check("A", "hang", hang),
        Check("A", "fail", fail),
        Check("A", "lack", lack),
        Check("A", "good", lambda: [ok("fine")]),
    ]
    answers, all_ended = run_checks(checks, limit_s=0.3)
    assert time.monotonic() - begin_s < 20
    assert not all_ended
    text = shown(finding for answer in answers for finding in answer.findings).splitlines()
    assert text[0].startswith("warning: hang did not answer within 0.3 s")
    assert text[1] == "warning: fail could not be checked (RuntimeError: boom second line); please report this"
    assert text[2] == "warning: lack cannot be checked: the package no_such_package_of_anybody is missing; install it"
    assert text[3] == "ok: fine"
    release.set()


def test_a_hanging_check_does_not_hold_the_command_up() -> None:
    program = (
        "import threading\n"
        "from kog_dist.doctor import checks, cli, runner\n"
        "from kog_dist.doctor.report import problem\n"
        "hang = runner.Check('A', 'hang', lambda: threading.Event().wait())\n"
        "checks.all_checks = lambda: [hang, runner.Check('A', 'bad', lambda: [problem('broken; mend it')])]\n"
        "runner.run_checks.__defaults__ = (0.2,)\n"
        "cli.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "")
    assert "hang did not answer within 0.2 s" in done.stdout


# --- GPUs -----------------------------------------------------------------------------------------------------------------------


def test_a_good_node(machine: Callable[[FakeNvml], None]) -> None:
    machine(node())
    assert shown(gpus.driver()) == "ok: driver 590.48.01 for CUDA up to 13.1"
    devices = list(gpus.devices())
    assert [finding.level for finding in devices] == [Level.OK] * 8
    assert "GPU 3 NVIDIA H200: GPU-00000003" in devices[3].text
    assert "140.5 of 141.0 GiB free, used by nobody, ECC on, MIG off" in devices[3].text
    assert devices[3].details["bus_id"] == "0000:13:00.0"
    assert shown(links.nvlink()) == "ok: NVLink: 18 links up on each of 8 GPUs"
    assert shown(links.peer_access()) == "ok: peer access: all 56 pairs of 8 GPUs read and write"
    assert shown(links.fabric()) == "ok: NVSwitch fabric: all GPUs registered"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mig", (1, 1), "MIG on; engines leave it alone"),
        ("compute", (8, 0), "needs compute capability 9.0"),
        ("ecc_errors", 3, "3 uncorrected memory errors"),
        ("compute_mode", 2, "forbids programs: nvidia-smi -c DEFAULT"),
        ("free", 2**30, "1.0 of 141.0 GiB free, used by nobody, ECC on, MIG off; a model may not fit"),
    ],
)
def test_what_is_wrong_with_a_gpu(machine: Callable[[FakeNvml], None], field: str, value: Any, words: str) -> None:
    machine(node(2, lambda index, gpu: setattr(gpu, field, value) if index == 1 else None))
    good, bad = gpus.devices()
    assert good.level is Level.OK
    assert bad.level is Level.WARNING
    assert words in bad.text


def test_who_uses_a_gpu(machine: Callable[[FakeNvml], None]) -> None:
    def occupy(_index: int, gpu: FakeGpu) -> None:
        gpu.processes, gpu.compute_mode = ((os.getpid(), 2**30), (2**22 + 5, None)), 3

    machine(node(1, occupy))
    (finding,) = gpus.devices()
    name = Path("/proc/self/comm").read_text().strip()
    assert f"used by {name} ({os.getpid()}), a process that is not visible here ({2**22 + 5})" in finding.text
    assert "allows one program, and it has one" in finding.text


def test_a_lost_gpu_is_named(machine: Callable[[FakeNvml], None]) -> None:
    machine(node(2, lambda index, gpu: setattr(gpu, "is_lost", index == 0)))
    assert shown(gpus.devices()).startswith("warning: GPU 0 does not answer (NVML error 15); look at dmesg")


def test_no_driver_is_no_problem(machine: Callable[[FakeNvml], None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeNvml(init_error=12))
    monkeypatch.setattr(gpus, "_nvidia_devices_on_bus", list)
    assert shown(gpus.driver()) == "ok: no GPU can be used: this machine has no NVIDIA driver; engines run on CPU ranks"
    monkeypatch.setattr(gpus, "_nvidia_devices_on_bus", lambda: ["0000:01:00.0"])
    assert shown(gpus.driver()).startswith("warning: this machine has no NVIDIA driver, though NVIDIA devices are on the PCI bus")
    for check in (
        gpus.devices,
        gpus.visible,
        links.nvlink,
        links.peer_access,
        links.fabric,
        compilers.cupy,
        compilers.cubin_cache,
    ):
        assert list(check()) == []


def test_an_old_driver_stops_gpus_that_could_run_the_kernel(
    machine: Callable[[FakeNvml], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlSystemGetCudaDriverVersion", lambda self: 12040)
    machine(node(1))
    assert shown(gpus.driver()).startswith("problem: driver 590.48.01 is for CUDA 12.4")
    machine(node(1, lambda _index, gpu: setattr(gpu, "compute", (8, 9))))
    assert shown(gpus.driver()).startswith("warning: ")


def test_masks_are_explained(machine: Callable[[FakeNvml], None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(node(2))
    for mask, expected in (
        ("1", "ok: CUDA_VISIBLE_DEVICES=1 shows 1 of 2"),
        ("", "warning: CUDA_VISIBLE_DEVICES= hides all 2; unset it"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert shown(gpus.visible()).startswith(expected)


def test_links_that_are_down(machine: Callable[[FakeNvml], None]) -> None:
    def damage(index: int, gpu: FakeGpu) -> None:
        if index == 1:
            gpu.nvlinks, gpu.peers_blocked, gpu.fabric = (1,) * 17 + (0,), frozenset({0}), (1, 0)

    machine(node(3, damage))
    assert "warning: NVLinks are down: GPU 1 (17 of 18 up)" in shown(links.nvlink())
    assert "each other's memory: 1-0;" in shown(links.peer_access())
    assert "has not taken in GPU 1; start nvidia-fabricmanager" in shown(links.fabric())
    machine(node(2, lambda _index, gpu: setattr(gpu, "nvlinks", ())))
    assert "no NVLink" in shown(links.nvlink())
    machine(node(2, lambda _index, gpu: setattr(gpu, "fabric", None)))
    assert list(links.fabric()) == []


@pytest.mark.parametrize(("num_gpus", "end"), [(9, "8-0; one"), (10, "8-0 and 1 more; one")])
def test_of_many_pairs_that_are_blocked_eight_are_named(machine: Callable[[FakeNvml], None], num_gpus: int, end: str) -> None:
    machine(node(num_gpus, lambda index, gpu: setattr(gpu, "peers_blocked", frozenset({0} if index else ()))))
    assert f"each other's memory: 1-0, 2-0, 3-0, 4-0, 5-0, 6-0, 7-0, {end} engine" in shown(links.peer_access())


def test_products_of_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: Path("/cache/matrix_products.so"))
    assert shown(compilers.host_library()) == "ok: CPU ranks multiply 16-bit weights as they are"
    monkeypatch.setattr(host_library, "library", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert shown(compilers.host_library()).startswith("warning: the C compiler (cc) cannot build")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert shown(compilers.host_library()).startswith("warning: no C compiler (cc)")


def test_compilers(machine: Callable[[FakeNvml], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(node(1))
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    assert shown(compilers.cupy()).startswith("problem: GPUs are here, but the package cupy is not")
    assert shown(compilers.compiler()).startswith("problem: no CUDA compiler")
    monkeypatch.setattr(shutil, "which", lambda name, **_: "/opt/nvcc")
    for release, expected in (
        ("13.0", "ok: CUDA compiler /opt/nvcc 13.0"),
        ("12.4", "problem: /opt/nvcc is of CUDA 12.4"),
        ("", "problem:"),
    ):
        monkeypatch.setattr(compilers, "output_of", lambda *_, release=release: f"Cuda compilation tools, release {release}, V1")
        assert shown(compilers.compiler()).startswith(expected)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert shown(compilers.cubin_cache()) == f"ok: built kernels are kept in {tmp_path / 'kog_dist' / 'cubins'}"


# --- software -------------------------------------------------------------------------------------------------------------------


def test_packages_are_compared_with_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "numpy>=2.0",
        "zebra>=1.1",
        "quagga[all]>=2; python_version > '3'",
        'okapi>=3; extra == "cuda"',
        'gnu>=1; extra == "mpi"',
    ]
    versions = {"kog-dist": "0.1", "numpy": "1.26.4", "quagga": "2.0.1+local", "okapi": "3.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(software, "metadata", SimpleNamespace(
        version=version, requires=lambda _: wanted, PackageNotFoundError=metadata.PackageNotFoundError,
    ))  # fmt: skip
    text = shown(software.packages())
    assert "problem: numpy 1.26.4 is too old; pip install 'numpy>=2.0'" in text
    assert "problem: packages are missing: zebra; pip install . in a clone" in text
    assert "ok: kog-dist 0.1 with numpy 1.26.4, quagga 2.0.1+local" in text
    assert "ok: for GPUs: okapi 3.1" in text
    assert f"ok: for mpirun, where it is wanted: {install('mpi')} (not here: gnu)" in text
    versions["okapi"] = "2.9"
    assert "warning: for GPUs: okapi 2.9 is too old; pip install" in shown(software.packages())


def test_sources_that_are_not_installed_want_what_pyproject_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    absent = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(software, "metadata", absent)
    text = shown(software.packages())
    assert "problem: packages are missing: jinja2, " in text, "nothing can start here"
    assert text.splitlines()[0].endswith(", typer, uvicorn; pip install -e .")
    assert f"ok: for GPUs, where it is wanted: {install('cuda')} (not here: cupy-cuda13x, nvidia-cublas)" in text
    monkeypatch.setattr(software, "_ROOT", tmp_path)
    assert shown(software.packages()).startswith("warning: kog-dist is not installed, so versions are not compared")


def test_extras_are_those_of_the_package() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert set(software.EXTRAS) == set(extras) - {"dev"}


def test_this_python_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(iter(software.python())).level is Level.OK
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert shown(software.python()).startswith("warning: the order of stores")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert shown(software.python()) == "problem: Darwin is not supported; use Linux"
    monkeypatch.setattr(software, "_OLDEST_PYTHON", (99, 0))
    assert shown(software.python()).startswith("problem: Python 3.")


# --- machine --------------------------------------------------------------------------------------------------------------------


def test_limits_of_all_control_groups_count(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("1:name=old:/x\n0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    assert cgroups.limit("cpu.max", mount=tmp_path, own=own) == ["max 100000", "150000 100000"]
    own.write_text("1:name=old:/x\n")
    assert cgroups.limit("cpu.max", mount=tmp_path, own=own) == []


def test_a_quota_of_time_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "limit", lambda name: ["max 100000", "50000 100000"])
    assert "warning: a quota allows the time of 0.5 CPUs" in shown(processors.cpus())
    monkeypatch.setattr(processors, "limit", lambda name: ["max 100000"])
    assert "warning" not in shown(processors.cpus())


def test_gpus_near_no_cpu_are_named(machine: Callable[[FakeNvml], None]) -> None:
    cpu = min(os.sched_getaffinity(0))
    far = 63 if cpu != 63 else 62
    machine(node(2, lambda index, gpu: setattr(gpu, "cpu_words", (1 << (cpu if index == 0 else far),))))
    if far in os.sched_getaffinity(0):
        pytest.skip("this machine has the CPU that the test takes for one that is not to be had")
    assert shown(processors.numa()).startswith("warning: no CPU near GPU 1 may be used")


def test_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(processors, "_HUGE_PAGES", file)
    assert "not offered" in shown(processors.huge_pages())
    file.write_text("always [madvise] never\n")
    assert shown(processors.huge_pages()) == "ok: transparent huge pages: madvise"
    file.write_text("always madvise [never]\n")
    assert shown(processors.huge_pages()).startswith("warning: transparent huge pages are off")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": ["max", str(2**30)], "memory.stat": [f"anon {900 * 2**20}\nfile 5\nshmem 0"]}
    monkeypatch.setattr(memory, "limit", lambda name: files.get(name, []))
    monkeypatch.setattr("kog_dist.runtime.memfd.available_bytes", lambda: 64 * 2**30)
    assert shown(memory.available()).startswith("problem: 124 MiB of memory are left (this container may have 1.0 GiB)")
    files["memory.stat"] = ["anon 0\nshmem 0"]
    assert shown(memory.available()) == "ok: 1.0 GiB of memory available (this container may have 1.0 GiB)"
    monkeypatch.setattr("kog_dist.runtime.memfd.available_bytes", lambda: 2**20)
    assert shown(memory.available()).startswith("problem: 1 MiB")
    monkeypatch.setattr("kog_dist.runtime.memfd.available_bytes", lambda: 2**10)
    assert shown(memory.unnamed_shared()).startswith("problem: shared memory (memfd) cannot be had: ")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, free=2**26))
    assert shown(memory.named_shared()).startswith("warning: /dev/shm has 64 MiB left, too little for MPI and Ray")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_NOFILE: (64, 64), resource.RLIMIT_NPROC: (-1, -1), resource.RLIMIT_AS: (2**30, -1)}
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    monkeypatch.setattr(limits, "limit", lambda name: ["100"] if name == "pids.max" else ["90"])
    assert shown(limits.open_files()).startswith("problem: only 64 files may be open")
    assert shown(limits.processes()).startswith("warning: this container may start only 10 more processes")
    assert shown(limits.address_space()).startswith("problem: a process may map only 1.0 GiB")
    values[resource.RLIMIT_AS] = (2**50, -1)
    assert shown(limits.address_space()).startswith("warning: a process may map 1048576.0 GiB, and CUDA maps all GPUs' memory")
    values |= {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_NPROC: (10, 10), resource.RLIMIT_AS: (-1, -1)}
    monkeypatch.setattr(limits, "limit", lambda name: ["max"])
    assert shown(limits.open_files()).startswith("warning: only 256 files")
    assert shown(limits.processes()).startswith("warning: this user may have only 10 processes")
    assert list(limits.address_space()) == []
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError(38, "not implemented")))
    assert shown(limits.supervision()).startswith("problem: this kernel or sandbox has no pidfds")


# --- launchers ------------------------------------------------------------------------------------------------------------------

MPICH, OPEN_MPI = "MPICH Version:      5.0.2\nmore", "Open MPI v4.1.6, package: x"
HYDRA, ORTE = "HYDRA build details:\n    Version: 5.0.2", "mpirun (Open MPI) 4.1.6\n"


@pytest.mark.parametrize(
    ("library", "starter", "environ", "expected"),
    [
        (MPICH, HYDRA, {}, "ok: /x/mpirun and mpi4py both use MPICH 5.0.2"),
        (OPEN_MPI, ORTE, {}, "ok: /x/mpirun and mpi4py both use Open MPI 4.1.6"),
        (MPICH, ORTE, {}, "warning: /x/mpirun belongs to Open MPI, but mpi4py uses MPICH 5.0.2"),
        (OPEN_MPI, HYDRA, {"PMI_RANK": "0", "PMI_SIZE": "2"}, "problem: /x/mpirun belongs to MPICH"),
        (None, HYDRA, {}, "warning: mpi4py cannot load an MPI library"),
        (MPICH, None, {}, "warning: mpi4py uses MPICH 5.0.2, and there is no mpirun"),
    ],
)
def test_mpi_pairs(
    monkeypatch: pytest.MonkeyPatch, library: str | None, starter: str | None, environ: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: name)
    monkeypatch.setattr(mpi, "python_output", lambda program: library)
    monkeypatch.setattr(mpi, "output_of", lambda *command: starter)
    monkeypatch.setattr(mpi, "mpirun", lambda: "/x/mpirun" if starter else None)
    monkeypatch.setattr(mpi, "os", SimpleNamespace(environ=environ))
    assert shown(mpi.mpi()).startswith(expected)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    monkeypatch.setattr(mpi, "mpirun", lambda: None)
    monkeypatch.setattr(mpi, "os", SimpleNamespace(environ={}))
    assert shown(mpi.mpi()).startswith("ok: no MPI")
    monkeypatch.setattr(mpi, "mpirun", lambda: "/x/mpirun")
    assert shown(mpi.mpi()).startswith("ok: /x/mpirun is here, mpi4py is not")
    monkeypatch.setattr(mpi, "os", SimpleNamespace(environ={"PMI_RANK": "0", "PMI_SIZE": "2"}))
    assert shown(mpi.mpi()).startswith("problem: MPICH has started this process, but mpi4py is missing")


def test_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_state, "find_spec", lambda name: name)
    assert shown(ray_state.ray()).startswith("ok: no Ray cluster runs here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert shown(ray_state.ray()) == f"ok: the Ray cluster at {address} answers (RAY_ADDRESS)"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        monkeypatch.delenv("RAY_ADDRESS")
        assert shown(ray_state.ray()).startswith(f"ok: a Ray cluster runs at {address}")
    assert shown(ray_state.ray()).startswith(f"warning: ignoring the dead Ray cluster {address}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert shown(ray_state.ray()).startswith(f"warning: no Ray cluster answers at RAY_ADDRESS {address}")
    monkeypatch.setattr(ray_state, "find_spec", lambda name: None)
    assert "but Ray is missing" in shown(ray_state.ray())


# --- service --------------------------------------------------------------------------------------------------------------------


def test_settings_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KOG_"):
            monkeypatch.delenv(name)
    assert [finding.details for finding in network.settings()] == [{"port": 8000}]  # of HTTP, whether it is free or taken
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("KOG_RPC_PORT", str(port))
        text = shown(network.settings())
        assert "ok: settings from the environment: KOG_RPC_PORT" in text
        assert f"warning: port {port} (rpc_port) is taken by process {os.getpid()} (" in text
    assert f"ok: port {port} (rpc_port) is free" in shown(network.settings())
    monkeypatch.setenv("KOG_PORT", "tcp://10.0.0.1:8000")
    assert "warning: KOG_PORT is what Kubernetes sets" in shown(network.settings())
    assert "KOG_PORT," not in shown(network.settings())
    monkeypatch.setenv("KOG_RANK", "2")
    assert shown(network.settings()).startswith("problem: KOG_RANK: there is no setting 'rank'; did you mean ranks?")


def test_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kog-") as folder:  # short: a long path is a finding of its own
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        check_instances(Path(folder))


def check_instances(runtime: Path) -> None:
    running = Instance.acquire("alive")
    dead = runtime / "kog" / "dead"
    dead.mkdir()
    (dead / LEASE_FILE).touch()
    text = shown(instances.instances())
    assert f"ok: instance folders: {runtime / 'kog'}, mode 0700" in text
    assert f"ok: running: alive, process {os.getpid()} (" in text
    assert f"warning: {dead} is left of an engine that was killed" in text
    assert dead.exists(), "the doctor changes nothing"
    running.remove()
    (runtime / "kog").chmod(0o755)
    assert shown(instances.instances()).startswith("problem: ")


def test_looking_at_a_lease_leaves_it_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    assert is_stale(folder)
    with (folder / LEASE_FILE).open("w") as lease:
        assert is_stale(folder)
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not is_stale(folder)
    assert not is_stale(tmp_path / "nothing")


# --- the command ----------------------------------------------------------------------------------------------------------------


def test_a_real_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    levels = {finding["level"] for finding in report["findings"]}
    assert ended.value.code == int("problem" in levels)
    assert report["ok"] == ("problem" not in levels)
    assert {"Software", "CPUs", "Memory", "Limits", "Launchers", "Service"} <= {finding["area"] for finding in report["findings"]}
    assert not [
        finding for finding in report["findings"] if "please report" in finding["text"] or "did not answer" in finding["text"]
    ]


def test_without_any_package_there_is_a_report_and_no_traceback(tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kog_dist.doctor.cli import main; main([])"
    environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == int("  problem " in done.stdout)
    assert re.search(r"packages are missing: .*\bnumpy\b", done.stdout), done.stdout
    assert "cannot be checked: the package safetensors is missing; install it" in done.stdout
    assert "please report" not in done.stdout


def test_unknown_flags_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--fix"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --fix" in capsys.readouterr().err
