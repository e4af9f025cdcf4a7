"""`engine_session`, in which benchmarks start engines: nothing is left where the benchmark itself is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARK = """
import signal, time
from kog_dist.bench.engine.session import engine_session
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children would not be ended by it
with engine_session() as session:
    server = session.start("http.server", ["--bind", "127.0.0.1", "0"], "server")
    print(server.pid, session.folder, flush=True)
    time.sleep(60)
"""
_ENDED_S = 30


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_told_to_end_ends_what_it_has_started(told: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _BENCHMARK], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid, _, folder = benchmark.stdout.readline().strip().partition(" ")
        server = os.pidfd_open(int(pid))
        benchmark.send_signal(told)
        assert benchmark.wait(_ENDED_S) == 128 + told
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(server, 0)
    os.close(server)
    assert not Path(folder).exists()
