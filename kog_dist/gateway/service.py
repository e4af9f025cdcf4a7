"""What all endpoints share: the model that is served, the way to the engine, metrics, log, limits."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kog_dist.gateway.args import GatewayArgs
from kog_dist.gateway.body_reader import BodyReader
from kog_dist.gateway.documents import handler_of
from kog_dist.gateway.engine import EngineBridge
from kog_dist.gateway.engine_facts import engine_facts, read_checkpoint
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.gateway.limits import LIMITS, Limits
from kog_dist.gateway.logs import Log
from kog_dist.gateway.metrics import UNREAD, Metrics
from kog_dist.gateway.model_files import read_model
from kog_dist.gateway.openai.served import ServedModel, shown_name
from kog_dist.gateway.readiness import Readiness
from kog_dist.hardware.gpus import read_inventory
from kog_dist.rpc.messages import StatusReport, Welcome
from kog_dist.runtime.http_file import HTTP_FILE, HttpFile
from kog_dist.system.files import write_at_once

if TYPE_CHECKING:
    from kog_dist.gateway.exchange import Exchange


class Service:
    """One gateway. Make it on the event loop's thread, before `run`."""

    def __init__(self, args: GatewayArgs, log: Log, *, url: str, limits: Limits = LIMITS) -> None:
        """Reads tokenizer and chat template. Raises CheckpointError for a model folder that cannot be used."""
        self.args, self.log, self.limits, self.url = args, log, limits, url
        self.begin_s = time.monotonic()
        self.created = int(time.time())
        self.tokenizer, self.chat_template, self._defaults = read_model(None if args.model is None else Path(args.model))
        self.readiness = Readiness(stall_s=args.stall_s)
        self.welcome: Welcome | None = None
        self._announced: HttpFile | None = None
        self.served: ServedModel | None = None  # None until the engine has said what it serves
        self.facts = EngineFacts()
        self.checkpoint, self._gpus = read_checkpoint(args.model, args.quantize, args.quantize_head), read_inventory().gpus
        self.weights_format = None if self.checkpoint is None else self.checkpoint.stored_format
        self.metrics = Metrics(args.model_name or "unknown")
        self.answering: set[Exchange] = set()
        self.bodies_bytes = 0  # of request bodies that are in memory
        self.bodies = BodyReader(args.model)
        self.bridge = EngineBridge(args.access, self.readiness, log, on_welcome=self._on_welcome, on_report=self._on_report)

    # ---- the engine ----
    def _on_welcome(self, welcome: Welcome) -> None:
        """The engine has said what it serves; it may be another one than before."""
        if self.tokenizer is not None and self.tokenizer.num_ids > welcome.vocab_size:
            self.readiness.mismatch(
                f"the tokenizer of {self.args.model} has {self.tokenizer.num_ids} ids and the engine's model {welcome.model} "
                f"{welcome.vocab_size}; give the gateway the folder of that model"
            )
            self.served = None
            return
        self.readiness.mismatch(None)
        if self.metrics.model_name != welcome.model:
            self.metrics = Metrics(welcome.model, max_context=welcome.max_context)
        self.facts = EngineFacts(max_context=welcome.max_context)  # the rest with the first report
        self.metrics.engine_facts(self.facts)
        self.welcome = welcome
        self.served = ServedModel(
            name=shown_name(self.args.served_names, welcome.model),
            aliases=(*self.args.served_names, welcome.model),
            max_context=welcome.max_context,
            vocab_size=welcome.vocab_size,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            created=self.created,
            defaults=self._defaults,
            engine_takes_text=welcome.has_tokenizer,
            leaves_out_unknown=self.args.unknown_fields != "refuse",
            obeys_special_tokens=self.args.special_tokens_in_content == "allow",
            reasoning_parser=self.args.reasoning_parser,
            tool_parser=self.args.tool_parser,
        )

    def _on_report(self, report: StatusReport | None) -> None:
        self.metrics.engine_report(report)
        if self._announced is not None and not self._announced.serves and self._serves():
            self.announce()
        if report is not None and self.welcome is not None and not self.facts.bytes_per_token:
            self.facts = engine_facts(self.welcome.max_context, self.checkpoint, report, self._gpus)
            self.metrics.engine_facts(self.facts)

    def count_response(self, path: str, status: int) -> None:
        """A response to this path was begun."""
        self.metrics.http_response(handler_of(path), status)

    def count_refusal(self, status: int) -> None:
        """A connection was refused before there was a request that could be read."""
        self.metrics.http_response(UNREAD, status)

    # ---- life ----
    def announce(self) -> None:
        """Write http.json into the instance folder now that the service answers: url, pid, and whether it `serves`.

        It is written again once it does: the launcher calls the engine ready when those who ask are not refused any more.
        """
        if self.args.instance_folder is None or not self.args.ends_with_engine:
            return
        self._announced = HttpFile(self.url, os.getpid(), self._serves())
        write_at_once(Path(self.args.instance_folder) / HTTP_FILE, json.dumps(asdict(self._announced)).encode(), is_private=True)

    def _serves(self) -> bool:
        return self.served is not None and self.readiness.health().serves

    def drain(self) -> None:
        """Take nothing new; running answers go on."""
        if not self.readiness.is_draining:
            self.readiness.is_draining = True
            self.log.event("draining", num_running=len(self.answering))

    async def drained(self) -> None:
        """Wait until nothing runs any more, and the engine is gone where this gateway ends with it; at most `drain_s`."""
        limit_s = self.args.drain_s + 1.0  # the engine ends what takes too long, and says so
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if not self.answering and not (self.args.ends_with_engine and self.readiness.is_connected):
                return
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Release what was opened."""
        self.bodies.close()
        if self.chat_template is not None:
            self.chat_template.close()
