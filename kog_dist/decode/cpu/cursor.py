"""Where the engine of a rank is: the pass being run, what the caller asked for, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.sampling import Candidate
from kog_dist.errors import PlanError
from kog_dist.sampling_params import SamplingParams

# Rank 0's choice, from all logits (vocab,) of the token at a position; None: no token can be chosen, and the request is to end.
# Asked of the tokens of a pass in their order, until what it chooses is not the next of them.
Choose: TypeAlias = Callable[[NDArray[Any], int], Candidate | None]

# With a KV cache, the first draft of the last pass that counts for its state, and how many; and how many of these to keep.
Replay: TypeAlias = Callable[[int, int, int, int], None]


class Chosen(NamedTuple):
    """What came out behind a token of a pass; the id counts if the logits are finite and rank 0 does not want to stop."""

    token_id: int
    finite: bool
    stopped: bool


class Cursor:
    """State of one rank's engine that its calls share."""

    def __init__(self, plan: Plan, num_lanes: int, num_kv_caches: int = 1) -> None:
        self.plan = plan
        self.token = 0  # passes of the engine so far; never restarts, since epochs grow with it
        self.held = [0] * num_kv_caches  # positions in each KV cache
        self.settled = [0] * num_kv_caches  # and those that its state has: fewer where drafts of the last pass count
        self.draft_position = 0  # of the first draft of the last pass that chose
        self.replays: dict[tuple[int, int], Replay] = {}  # of each layer with a state, by the first lane of a call
        self.kv_cache = 0  # the one in use
        self.token_ids: Sequence[int] = (0,)  # of the pass, at following positions
        self.position = 0  # of the first of them
        self.sampling: SamplingParams | None = None
        self.lengths = [[0] * num_lanes for _ in range(plan.spec.num_layers)]  # of the KV cache, by layer and own lane
        self.chosen: list[Chosen] = []  # behind the first token of the pass, and behind each that was chosen itself
        self.stopped = False  # what this rank wants; rank 0's wish counts
        self.all_logits: NDArray[Any] | None = None  # (tokens, vocab)
        self.choose: Choose | None = None

    def goes_on(self, idx: int, token_id: int) -> bool:
        """Whether `token_id`, chosen behind token `idx` of the pass, is the one that the pass has next."""
        return idx + 1 < len(self.token_ids) and token_id == self.token_ids[idx + 1]

    def begin(
        self, token_ids: Sequence[int], position: int, sampling: SamplingParams | None, stop: bool, choose: Choose | None = None
    ) -> None:
        """Start the next pass. Raises PlanError if the caller asks for a token or position that cannot follow."""
        spec = self.plan.spec
        for token_id in token_ids:
            if not 0 <= token_id < spec.vocab_size:
                raise PlanError(f"token id {token_id} is outside the vocabulary of {spec.vocab_size}")
        if not 0 <= position <= self.held[self.kv_cache]:
            raise PlanError(f"position {position} cannot follow: the KV cache holds {self.held[self.kv_cache]} positions")
        if spec.is_recurrent and position not in (0, self.settled[self.kv_cache]):
            raise PlanError(f"position {position} cannot follow a state of {self.settled[self.kv_cache]} positions")
        last = position + len(token_ids) - 1
        if last >= spec.max_context:
            raise PlanError(f"position {last} exceeds the model's context of {spec.max_context}")
        self.token += 1
        self.token_ids, self.position, self.sampling = token_ids, position, sampling
        self.chosen, self.stopped, self.all_logits = [], stop, None
        self.choose = choose
        for layer in self.lengths:  # shorter after a reset or a step back; longer if the last token was not finished
            layer[:] = [position] * len(layer)
