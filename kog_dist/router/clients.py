"""The router's clients: what they are sent under their own ids, and how their requests end."""

from __future__ import annotations

from dataclasses import replace

from kog_dist.router.requests import RoutedRequest
from kog_dist.rpc.client_events import ClientEvents
from kog_dist.rpc.listener import error_event
from kog_dist.rpc.messages import Accepted, Cancel, Done, ErrorCode, FinishReason, PrefillProgress, PromptLogprobs


class RoutedEvents(ClientEvents[RoutedRequest]):
    """Passes on what a replica says of a request; a replica that works on one for nobody is told."""

    def pass_on(self, request: RoutedRequest, event: Accepted | PrefillProgress | PromptLogprobs) -> None:
        """Send an event that a replica has sent, under the client's id."""
        self.send(request, replace(event, request_id=request.request_id))

    # ---- ends of a request ----
    def finish(self, request: RoutedRequest, event: Done) -> None:
        """It ended well, as its replica says; times count from its arrival here."""
        waited_s = request.waited_s
        done = replace(
            event,
            request_id=request.request_id,
            queue_s=event.queue_s + waited_s,
            total_s=event.total_s + waited_s,
            ttft_s=None if event.ttft_s is None else event.ttft_s + waited_s,
        )
        self.end(request, event.finish_reason, [done])

    def cancel(self, request: RoutedRequest, now_s: float) -> None:
        """Somebody does not want it any more."""
        total_s = now_s - request.arrived_s
        queue_s = total_s if request.link is None else request.waited_s
        num_prompt_tokens = len(request.message.prompt_ids or ())  # of a text only its replica knows
        done = Done(request.request_id, FinishReason.CANCELLED, num_prompt_tokens, request.num_tokens, queue_s, total_s)
        if self._withdraw(request):
            self._finished(request, FinishReason.CANCELLED, [done])

    def give_up(self, request: RoutedRequest, code: ErrorCode, message: str) -> None:
        """A replica did not take it, and no other one would."""
        if self._requests.remove(request):
            self._counters.refused(code)
            self.send(request, error_event(code, message, request.request_id))

    def _withdraw(self, request: RoutedRequest) -> bool:
        """A replica that still has it is told that nobody wants it any more."""
        was_open = super()._withdraw(request)
        if was_open and request.link is not None:
            request.link.send(Cancel(request.attempt_id))
        return was_open
