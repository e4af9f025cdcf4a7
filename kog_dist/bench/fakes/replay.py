"""`kog-bench replay`: the fake engine as a process with an instance name, found as any engine is found."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kog_dist.bench.fakes.fake_engine import FakeEngine, FakeEngineSettings, with_context
from kog_dist.bench.fakes.replay_script import ReplayScript, script_text
from kog_dist.errors import RequestError
from kog_dist.rpc.listener import RpcListener
from kog_dist.runtime.instance import Instance
from kog_dist.workers.coordinator.model_folder import ModelFolder


def run(settings: FakeEngineSettings, model: Path, model_name: str, *, text: str | None, max_context: int) -> None:
    """Serve until SIGTERM or Ctrl-C (the running requests are finished; a second one ends them) or `kog-client drain`.

    Raises LaunchError where the name is taken, ConfigError where the text cannot be replayed.
    """
    served = with_context(ModelFolder.from_folder(model, model_name), max_context)
    if served.tokenizer is None:
        raise RequestError("no_tokenizer", f"{model} has no tokenizer, so no text can be cut into its tokens; give another model")
    script = ReplayScript.of_text(script_text(text), served.tokenizer)
    instance = Instance.acquire(settings.instance)
    try:
        engine = FakeEngine(settings, served, script, RpcListener(instance.folder))
        wakeup_fd, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)

        def stop(_signum: int, _frame: object) -> None:
            engine.num_stop_signals += 1

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        kind = "the moment of each token" if settings.stamps else f"a text of {len(script)} tokens"
        print(
            f"fake engine {settings.instance!r}: {settings.rate:g} tokens/s, {settings.num_ranks} ranks, "
            f"{settings.max_running} at a time, {kind}",
            file=sys.stderr,
            flush=True,
        )
        engine.run(wakeup_fd)
        counted = engine.counters
        print(
            f"fake engine: {counted.num_completed} answers completed, {counted.num_cancelled} cancelled, "
            f"{counted.num_failed} failed; {counted.num_tokens} tokens",
            file=sys.stderr,
            flush=True,
        )
    finally:
        instance.remove()
