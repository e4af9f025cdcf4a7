"""Settings of all tests, and: those that need GPUs are skipped, with a reason, where there are too few."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.core_seconds_of_tests import CoreSeconds
from tests.opened import Opened

# Imports of a thousand modules leave no garbage, and looking for some among them takes seconds: see `pytest_collection_finish`.
gc.disable()
# Threads that spin for each other take the cores from everything else: 64 tokens of the oracle took 44 s instead of 2 s on two
# busy cores. Read when NumPy and torch are imported; children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A shell that starts this run in the background ignores it, and all processes inherit that: no Ctrl-C of a test would reach them.
for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, usual)
# Every run has the same examples, and how long they take is a matter of the machine.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# For mutants (tests/mutants/) a failure is enough: nobody reads its smallest example, which takes minutes to find.
settings.register_profile("mutants", settings.get_profile("suite"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("TESTS_HYPOTHESIS_PROFILE", "suite"))


UNIT = Path(__file__).parent / "unit"
LONG = (
    "_twin.py",
    "_log.py",
    "_tape.py",
    "_tiles.py",
    "_experts.py",
    "_dense.py",
    "_folders.py",
    "_programs.py",
    "_registers.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CoreSeconds(), "core-seconds")
    config.pluginmanager.register(Opened(), "opened")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Logs and histories of what tests start stay out of the user's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of many seconds begin before those of few, which fill what is left of a worker's time at the end.
    items.sort(key=lambda item: (item.path.is_relative_to(UNIT), not item.path.name.endswith(LONG)))
    needed = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if not needed:
        return
    import torch

    from tests.gpu.sharing import RANKS_PER_GPU

    present = torch.cuda.device_count()
    for item, mark in needed:
        count, sharing = mark.args[0], RANKS_PER_GPU if mark.kwargs.get("may_share") else 1
        if present * sharing < count:
            shared = f" for {sharing} ranks each" if sharing > 1 else ""
            missing = f"needs {-(-count // sharing)} CUDA device{'s' if count > sharing else ''}{shared}, found {present}"
            item.add_marker(pytest.mark.skip(reason=missing))
