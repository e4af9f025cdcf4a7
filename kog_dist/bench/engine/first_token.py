"""`kog-bench first-token`: the host's way to a first token, without a GPU: coordinator and client are real, rank 0 is a fake."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from kog_dist.bench.engine.processes import child_process, wait_ready
from kog_dist.bench.engine.request_client import RequestClient
from kog_dist.bench.engine.request_measures import FIRST_OF, Measures, Workload
from kog_dist.bench.engine.request_stages import show_first_tokens
from kog_dist.bench.fakes.fake_rank import Play
from kog_dist.bench.report import finish, machine
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.workers.coordinator.arguments import CoordinatorArgs

_DRAIN_S = 5.0


def run(play: Play, *, repeats: int) -> None:
    """Measure each prompt of `play`; prints a line for each and the stages, then the JSON object. Raises LaunchError."""
    before = machine()
    workload = Workload(tuple(play.chunks_ms), kept=0, new=0, context=0, tokens=0, repeats=repeats)
    spec = ModelSpec(
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=16,
        vocab_size=1000,
        max_context=max(play.chunks_ms) + FIRST_OF,
        num_lanes=4,
    )
    with _engine(spec, play) as access:
        client = RequestClient(access)
        try:
            measures = Measures(client, spec, workload)
            measures.warm_up()
            figures = measures.first_tokens()
        finally:
            client.close()
    show_first_tokens("host", figures, {})
    finish("first-token", {**asdict(play), "repeats": repeats}, before, figures)


@contextlib.contextmanager
def _engine(spec: ModelSpec, play: Play) -> Iterator[Access]:
    """A coordinator and the fake rank, ready."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kog-f-")))
        folder, model = root / "instance", root / "model"
        folder.mkdir(mode=0o700)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(spec.to_config()), encoding="utf-8")
        control = stack.enter_context(contextlib.closing(ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size)))
        args = CoordinatorArgs("played", str(folder), -1, control.fd, str(model), "played", os.getpid(), _DRAIN_S)
        children = [
            stack.enter_context(child_process(module, *arguments, pass_fds=(control.fd,)))
            for module, *arguments in (
                ("kog_dist.workers.coordinator.process", args.to_json()),
                ("kog_dist.bench.fakes.fake_rank", str(control.fd), play.to_json()),
            )
        ]
        socket = folder / SOCKET_NAME
        wait_ready(lambda: control.state(0) is RankState.READY and socket.exists(), children, "the engine with a fake rank")
        yield Access.from_folder(folder)
