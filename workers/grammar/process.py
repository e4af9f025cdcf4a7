"""A grammar process: `python -m kog_dist.workers.grammar.process JSON`, a child of the coordinator.

Grammars come from strangers, and compiling them is the work of a library: it happens in a process that may run out of memory,
hang or crash without harm to anybody else. There are two, of one program. The checker says whether what is asked for can be used
(checks.py). The runner compiles what was found good once more, and writes a mask for every token that rank 0 is about to choose.
Neither learns anything but a grammar and token ids; the coordinator needs no answer from the runner.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgpack  # type: ignore[import-untyped]

from kog_dist.errors import KogError, LaunchError
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.pace import Pace
from kog_dist.runtime.process_arguments import JsonArguments
from kog_dist.runtime.ring import Finish, TokenEntry, TokenRing
from kog_dist.runtime.wait import Deadline, sleep_precisely
from kog_dist.system.python_child import begin_helper
from kog_dist.workers.grammar.checks import MAX_PACKET_BYTES, Checks
from kog_dist.workers.grammar.compiler import Constraint, GrammarCompiler

_MEMORY_BYTES = 2 << 30  # private memory of this process; beyond it allocations fail
_RING_WAIT_S = 0.05  # an abort is seen this late
_RING_POLL_S = 0.001  # tokens of writers that wake nobody
READY = {"ready": True}


@dataclass(frozen=True, slots=True)
class GrammarArgs(JsonArguments):
    """What the process is told on its command line. The descriptors are inherited."""

    reader: ClassVar[str] = "grammar process"

    model: str  # folder of the checkpoint
    control_fd: int
    socket_fd: int  # one end of a SOCK_SEQPACKET pair
    parent_pid: int
    checks: bool  # or runs
    memory_bytes: int = _MEMORY_BYTES


def run_message(seq: int, slot: int, mask_epoch: int, constraint: Constraint, *, drafts: bool) -> dict[str, object]:
    """Tells the runner to follow request `seq` through its slot's ring. `drafts`: rank 0 wants to know what is forced, too."""
    return {"run": seq, "slot": slot, "mask_epoch": mask_epoch, "drafts": drafts, **constraint.as_message()}


def main() -> int:
    """Serve until the coordinator is gone. Returns the exit code."""
    args = GrammarArgs.from_json(sys.argv[1])
    if not begin_helper(args.parent_pid, args.memory_bytes):
        return 0  # the coordinator was gone before it could be watched
    return serve(args, prepare)


def prepare(args: GrammarArgs) -> tuple[ControlPage, GrammarCompiler]:
    """What it works with; takes seconds for a large vocabulary. Raises KogError."""
    control = ControlPage.from_fd(args.control_fd)
    tokenizer = Tokenizer.from_folder(Path(args.model))
    if tokenizer is None:
        raise LaunchError(f"{args.model} has no tokenizer, so no grammar can be followed")
    return control, GrammarCompiler(tokenizer, control.masks.vocab_size)


def serve(args: GrammarArgs, prepared: Callable[[GrammarArgs], tuple[ControlPage, GrammarCompiler]]) -> int:
    """Check or run until the coordinator is gone. Returns the exit code."""
    sleep_precisely()
    try:
        control, compiler = prepared(args)
    except KogError as error:
        print(f"grammar process: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    with socket.socket(fileno=args.socket_fd) as channel:
        channel.send(msgpack.packb(READY))
        if args.checks:
            Checks(channel, compiler).serve()
        else:
            run_requests(channel, control, compiler)
    return 0


def run_requests(channel: socket.socket, control: ControlPage, compiler: GrammarCompiler) -> None:
    """Follow one request after the other, until the coordinator closes its end."""
    while packet := channel.recv(MAX_PACKET_BYTES):
        message = msgpack.unpackb(packet)
        constraint = Constraint.of_message(message)
        follow(control, compiler, constraint, message["run"], message["slot"], message["mask_epoch"], drafts=message["drafts"])


def follow(
    control: ControlPage, compiler: GrammarCompiler, constraint: Constraint, seq: int, slot: int, mask_epoch: int, *, drafts: bool
) -> None:
    """Write the mask of each token of request `seq` as soon as the token before it is in the ring, until its last entry.

    `drafts`: in front of it, what is forced: rank 0 begins its pass with that, and needs the mask at its end.
    Returns early when the engine is being stopped, or when the coordinator has handed out a newer request in this slot.
    """
    matcher, pace = compiler.compile(constraint), Pace()
    index = 0
    while True:
        if drafts:
            control.forced_slots[slot].put(mask_epoch + index, matcher.forced())
        control.mask_slots[slot].put(mask_epoch + index, matcher.mask())
        if matcher.error:
            print(f"grammar of request {seq}, token {index}: {matcher.error}", file=sys.stderr, flush=True)
        while (entry := _next_entry(control.rings[slot], seq, index, pace)) is None:
            if control.aborted() or control.newest(slot) > seq:
                return
        pace.token()
        if entry.finish is not Finish.NONE:
            return
        matcher.accept(entry.token_id)
        index += 1


def _next_entry(ring: TokenRing, seq: int, index: int, pace: Pace) -> TokenEntry | None:
    """Wait for a token, at most _RING_WAIT_S; without sleeping when it is likely to come."""
    entry = None
    if (until_near_s := pace.until_near_s()) > 0:
        entry = ring.wait(seq, index, Deadline.after(min(until_near_s, _RING_WAIT_S)), poll_s=_RING_POLL_S)
    while entry is None and pace.until_near_s() <= 0:
        entry = ring.get(seq, index)
        if entry is None:
            os.sched_yield()
    return entry


if __name__ == "__main__":
    sys.exit(main())
