"""An engine whose coordinator is real and whose ranks are a thread that answers what a test tells it to."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import tokenizers

from kog_dist.decode.request import DecodeRequest
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.client import Client
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.transport import Access
from kog_dist.runtime.control import AbortCause, ControlPage, RankState
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.wait import Deadline, WaitResult
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.loop import Coordinator
from kog_dist.workers.coordinator.model_folder import ModelFolder

EOS_ID = 256
VOCAB_SIZE = 257
PATIENCE_S = 20.0  # of every wait in these tests


def write_model(folder: Path, *, max_context: int, with_tokenizer: bool) -> None:
    """A model folder without weights: bytes are tokens (byte-level BPE without merges), id 256 ends an answer."""
    folder.mkdir()
    spec = ModelSpec(
        hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=4, intermediate_size=16, vocab_size=VOCAB_SIZE,
        max_context=max_context, num_lanes=4,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(spec.to_config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    if not with_tokenizer:
        return
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    library.save(str(folder / "tokenizer.json"))


class FakeEngine:
    """`answer(request)` gives the ids that rank 0 generates, EOS included; each needs a permit from `allow`."""

    def __init__(
        self, folder: Path, answer: Callable[[DecodeRequest], Sequence[int]], *, world_size: int = 2, max_context: int = 256,
        with_tokenizer: bool = True, ready: bool = True, paced: bool = False, queue_limit: int = 4, drain_s: float = PATIENCE_S,
        tcp_port: int | None = None, own_process: bool = False, client_queue_limit: int = 4,
    ) -> None:  # fmt: skip
        self.folder = folder / "instance"
        self.folder.mkdir(mode=0o700)
        self.model = folder / "model"
        write_model(self.model, max_context=max_context, with_tokenizer=with_tokenizer)
        self.control = ControlPage.create(world_size, max_context, vocab_size=VOCAB_SIZE)
        self.access = Access.from_folder(self.folder)
        self.exit_code: int | None = None
        self.faulty_index: int | None = None
        self.requests: list[DecodeRequest] = []
        self._answer = answer
        self._permits = threading.Semaphore(0 if paced else 10**9)
        self._closing = threading.Event()
        self._supervisor = subprocess.Popen(["sleep", "1000"])
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        if ready:
            self.become_ready()
        self.args = CoordinatorArgs(
            "test", str(self.folder), -1, self.control.fd, str(self.model), "tiny", self._supervisor.pid, drain_s, tcp_port,
            queue_limit, client_queue_limit,
        )  # fmt: skip
        if own_process:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kog_dist.workers.coordinator.process", self.args.to_json()], pass_fds=(self.control.fd,)
            )
        else:
            listener = RpcListener(self.folder, tcp_port=tcp_port)
            self.coordinator = Coordinator(self.args, self.control, ModelFolder.from_folder(self.model, "tiny"), listener)
            self._start(self._serve)
        self._start(self._decode)

    def _start(self, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    # ---- what tests do ----
    def client(self) -> Client:
        return Client(self.access, connect_timeout_s=PATIENCE_S, patient=True)

    def allow(self, num_tokens: int) -> None:
        self._permits.release(num_tokens)

    def become_ready(self) -> None:
        for rank in range(self.control.world_size):
            self.control.set_state(rank, RankState.READY)

    def abort(self, cause: AbortCause, rank: int) -> None:
        self.control.set_abort(cause, rank)

    def kill_supervisor(self) -> None:
        self._supervisor.kill()
        self._supervisor.wait(PATIENCE_S)

    def stop_supervisor(self) -> None:
        self._supervisor.send_signal(signal.SIGSTOP)
        self.until(lambda: psutil.Process(self._supervisor.pid).status() == psutil.STATUS_STOPPED)

    def signal_coordinator(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def wait_exit(self) -> int:
        """The coordinator's exit code, once it has ended by itself."""
        if self._process is not None:
            return self._process.wait(PATIENCE_S)
        self._threads[0].join(PATIENCE_S)
        assert self.exit_code is not None, "the coordinator did not end"
        return self.exit_code

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline.after(PATIENCE_S)
        while not condition():
            assert not deadline.expired(), "the condition did not come true"
            time.sleep(0.002)

    def close(self) -> None:
        self._closing.set()
        self.allow(1000)
        self.control.set_abort(AbortCause.SHUTDOWN)
        if self._process is not None:
            self._process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._supervisor.kill()
        self._supervisor.wait(PATIENCE_S)
        self.control.close()

    # ---- the other processes ----
    def _serve(self) -> None:
        self.exit_code = self.coordinator.run()

    def _decode(self) -> None:
        """Rank 0, and the others' words."""
        seq = 0
        while not self._closing.is_set():
            result = self.control.wait_doorbell(0, seq, Deadline.after(0.02))
            if result is WaitResult.ABORT:
                return
            if result is WaitResult.OK:
                seq += 1
                self._decode_one(seq)
                for rank in range(self.control.world_size):
                    self.control.set_read(rank, seq)

    def _decode_one(self, seq: int) -> None:
        request = self.control.read_request(seq)
        self.requests.append(request)
        ring = self.control.ring
        answer = list(self._answer(request))[: request.max_tokens]
        for index in range(request.max_tokens):
            if not self._permitted(seq):
                if not self.control.aborted():
                    ring.put(seq, index, NO_TOKEN, time.monotonic_ns(), None, Finish.CANCELLED)
                return
            token_id = answer[index % len(answer)]
            finish = Finish.LENGTH if index == request.max_tokens - 1 else Finish.NONE
            if token_id in request.stop_ids and not request.ignore_eos:
                finish = Finish.STOP
            if index == self.faulty_index:
                token_id, finish = NO_TOKEN, Finish.NUMERICAL_FAULT
            digest = hashlib.sha256(str(index).encode()).digest() if request.logit_digests else None
            ring.put(seq, index, token_id, time.monotonic_ns(), digest, finish)
            if finish is not Finish.NONE:
                return

    def _permitted(self, seq: int) -> bool:
        """Wait for a permit; False when the request was cancelled or everything is being stopped."""
        while True:
            if self.control.cancelled(seq) or self.control.aborted() or self._closing.is_set():
                return False
            if self._permits.acquire(timeout=0.002):
                if not self.control.cancelled(seq):
                    return True
                self._permits.release()  # it was meant for the next request


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Starts fake engines with a short folder name and closes them."""
    engines: list[FakeEngine] = []

    def start(answer: Callable[[DecodeRequest], Sequence[int]] | str = "hello", **settings: object) -> FakeEngine:
        folder = tmp_path / str(len(engines))
        folder.mkdir()
        fixed = answer
        script = (lambda _request: list(fixed.encode())) if isinstance(fixed, str) else fixed
        engines.append(FakeEngine(folder, script, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
