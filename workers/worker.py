"""The process of one rank: startup, then requests one after the other, until the engine is stopped.

`python -m kog_dist.workers.worker JSON`; the JSON is `WorkerArgs`. Its last line on stderr says why it stopped by itself.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import partial

from kog_dist.errors import AbortedError, ConfigError, DeviceError, KogError, sentence_of
from kog_dist.runtime.control import AbortCause, ControlPage, RankState
from kog_dist.runtime.wait import WaitResult, sleep_precisely
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.base import Engine
from kog_dist.workers.intake import Intake


class WorkerExit(IntEnum):
    """Exit codes of a rank; 0 only when it was told to stop."""

    STOPPED = 0
    RANK_FAILED = 70
    STALL = 71
    NUMERICAL = 72
    CONFIG_MISMATCH = 73
    DEVICE_ERROR = 74


def main() -> None:
    """Run the rank and exit with a `WorkerExit`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    sys.exit(run(sys.argv[1] if len(sys.argv) == 2 else ""))


def run(arguments: str) -> int:
    """The whole life of the rank; returns its exit code."""
    try:
        args = WorkerArgs.from_json(arguments)
        control = ControlPage.from_fd(args.info.control_fd)
    except KogError as error:
        return _last_words(error, WorkerExit.CONFIG_MISMATCH)
    rank = args.info.rank
    args.placement.apply()
    try:
        live(partial(make_engine, args, control), control, rank)
    except AbortedError:
        control.set_state(rank, RankState.STOPPED)
        cause = control.abort()
        return WorkerExit.STOPPED if cause is not None and cause[0] is AbortCause.SHUTDOWN else WorkerExit.RANK_FAILED
    except DeviceError as error:
        return _last_words(error, WorkerExit.STALL)
    except ConfigError as error:
        return _last_words(error, WorkerExit.CONFIG_MISMATCH)
    except KogError as error:
        return _last_words(error, WorkerExit.RANK_FAILED)
    except Exception as error:  # a defect, or no memory: the trace goes to the log, its last line to the user
        traceback.print_exc()
        return _last_words(error, WorkerExit.RANK_FAILED)
    return WorkerExit.STOPPED


def live(make: Callable[[], Engine], control: ControlPage, rank: int) -> None:
    """Make, start, serve and close an engine. Raises what has ended it.

    That it has failed is said before it is closed, which takes a while: nobody waits for that, and it meets nobody any more.
    """
    with ExitStack() as stack:
        try:
            engine = make()
            stack.callback(engine.close)
            engine.startup()
            gc.freeze()  # what it has made by now stays, and need not be looked through while somebody waits for a token
            serve(engine, control, rank)
        except AbortedError:
            raise
        except Exception as error:
            if isinstance(error, DeviceError):
                control.request_abort(rank, error.record)
            control.set_state(rank, RankState.FAILED)
            raise


def make_engine(args: WorkerArgs, control: ControlPage) -> Engine:
    """The engine of the device that was asked for. Raises ConfigError for a device that there is no engine for."""
    if args.device == "cpu":
        with _importing():
            from kog_dist.workers.engines.cpu import CpuEngine

        return CpuEngine(args, control)
    if args.device.partition(":")[0] == "cuda":
        with _importing():
            from kog_dist.workers.engines.cuda import CudaEngine

        sleep_precisely()  # it waits for its kernel that way, 20 us at a time
        return CudaEngine(args, control)
    raise ConfigError(f"rank {args.info.rank}: there is no engine for device {args.device!r}")


@contextmanager
def _importing() -> Iterator[None]:
    """Modules stay: looking for garbage among what they make takes a tenth of their imports, then and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(engine: Engine, control: ControlPage, rank: int) -> None:
    """Run requests in the order of their seq until the engine is aborted, which raises AbortedError."""
    intake = Intake(control, rank)
    if engine.rouse is not None:
        control.heed_rousing(rank)
    control.beat(rank)
    control.set_state(rank, RankState.READY)
    while True:
        if control.wait_doorbell(rank, intake.seq, when_roused=engine.rouse) is WaitResult.ABORT:
            raise AbortedError(f"rank {rank} was idle when the engine was stopped")
        seq, request = intake.take()
        control.set_state(rank, RankState.RUNNING)
        if request.only_copies:
            engine.copy_blocks(request.kv)
        else:
            engine.run(seq, request, intake)
        control.set_state(rank, RankState.READY)


def _last_words(error: Exception, code: WorkerExit) -> WorkerExit:
    print(sentence_of(error), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
