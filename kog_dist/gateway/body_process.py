"""The process that reads large bodies: `python -m kog_dist.gateway.body_process JSON`, a child of the gateway.

It learns bodies and answers with what body_work makes of them. It may run out of memory, or be killed for taking too long,
without harm to anybody else.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

import msgpack  # type: ignore[import-untyped]

from kog_dist.errors import KogError
from kog_dist.gateway import body_work
from kog_dist.gateway.model_files import read_model
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, packed_error
from kog_dist.records import dataclass
from kog_dist.sampling_params import SamplingParams
from kog_dist.system.python_child import begin_helper

LENGTH: Final = struct.Struct("<I")  # before a question's head, its body, and an answer
CPU_S: Final = 3.0  # for one body; most take less than 0.3, a text of 4 MiB that turns out to be short in tokens 2
OUT_OF_MEMORY: Final = 70  # exit code
_MEMORY_BYTES: Final = 2 << 30  # private memory; beyond it allocations fail
_TOLD: Final = frozenset(item.name for item in dataclasses.fields(ServedModel)) - {"tokenizer", "chat_template", "defaults"}


@dataclass(frozen=True, slots=True)
class BodyArgs:
    """What the process is told on its command line. The descriptor is inherited."""

    model: str | None  # folder of the checkpoint
    socket_fd: int
    parent_pid: int

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))


def question(path: str, served: ServedModel, key_scope: str) -> bytes:
    """What is asked of a body: the path that it came to, the scope of its key, and the model, which may have changed; but for
    what is in its folder.
    """
    facts = {name: getattr(served, name) for name in sorted(_TOLD)}
    head: bytes = msgpack.packb([path, key_scope, facts, asdict(served.defaults)])
    return head


def main() -> int:
    """Serve until the gateway is gone. Returns the exit code."""
    args = BodyArgs(**json.loads(sys.argv[1]))
    if not begin_helper(args.parent_pid, _MEMORY_BYTES):
        return 0  # the gateway was gone before it could be watched
    try:
        tokenizer, template, _defaults = read_model(None if args.model is None else Path(args.model))
    except KogError as error:
        print(f"body process: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    with socket.socket(fileno=args.socket_fd) as channel, channel.makefile("rb") as stream:
        while (head := _received(stream)) and (raw := _received(stream)):
            path, key_scope, facts, defaults = msgpack.unpackb(head)
            facts["aliases"], defaults["logit_bias"] = tuple(facts["aliases"]), tuple(map(tuple, defaults["logit_bias"]))
            served = ServedModel(**facts, tokenizer=tokenizer, chat_template=template, defaults=SamplingParams(**defaults))
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends this process
            try:
                answer = msgpack.packb(answer_to(path, raw, served, key_scope))
            except MemoryError:
                return OUT_OF_MEMORY
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(LENGTH.pack(len(answer)) + answer)
    return 0


def answer_to(path: str, raw: bytes, served: ServedModel, key_scope: str) -> Mapping[str, object]:
    """Of `error`, `mistake`, `answer` (its JSON) or a packed request the one that there is."""
    try:
        found = body_work.read(path, raw, served, key_scope)
        return packed(found) if isinstance(found, Planned) else {"answer": found}
    except ApiError as error:
        return {"error": packed_error(error)}
    except MemoryError:
        raise
    except Exception as error:  # the gateway's log says it; the next body is read all the same
        return {"mistake": f"{type(error).__name__}: {error!s:.500}"}


def _received(stream: BinaryIO) -> bytes:
    """The next part of a question; empty once the gateway is gone."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


if __name__ == "__main__":
    sys.exit(main())
