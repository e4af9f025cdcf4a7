"""Where the engine of a rank is: the pass being run, what the caller asked for, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import NamedTuple, TypeAlias

import numpy as np

from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.sampling import Candidate
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.records import dataclass
from kog_dist.sampling_params import SamplingParams

# Rank 0's choice, from all logits (vocab,) of the token at a position; None: no token can be chosen, and the request is to end.
# Asked of a request's tokens of a pass in their order, until what it chooses is not the next of them.
Choose: TypeAlias = Callable[[Array, int], Candidate | None]

# With a KV cache, which of the last pass's drafts is the first that counts for its state, how many, and how many to keep.
Replay: TypeAlias = Callable[[int, int, int, int], None]


class Chosen(NamedTuple):
    """What came out behind a token of a pass; the id counts if the logits are finite and rank 0 does not want to stop."""

    token_id: int
    finite: bool
    stopped: bool


@dataclass(slots=True)
class PassPart:
    """What one request has in a pass: tokens at following positions, from `position` on, of KV cache `cache`.

    `sampling`: how the token behind each is chosen; None of a prompt. `stop`: nothing is chosen, and all ranks leave the request
    after this pass; rank 0's counts. `choose`: rank 0's own choice.
    """

    token_ids: Sequence[int]
    position: int
    sampling: SamplingParams | None
    cache: int = 0
    stop: bool = False
    choose: Choose | None = None
    first: int = 0  # number of its first token in the pass, from where it begins
    chosen: list[Chosen] = field(default_factory=list)  # behind its first token, and behind each that was chosen itself

    def goes_on(self, idx: int, token_id: int) -> bool:
        """Whether `token_id`, chosen behind its token `idx`, is the one that it has next."""
        return idx + 1 < len(self.token_ids) and token_id == self.token_ids[idx + 1]


class Span(NamedTuple):
    """Where keys and values of some tokens of a pass are: `num` from number `first` on, at positions of a KV cache."""

    cache: int
    position: int
    first: int
    num: int


class Cursor:
    """State of one rank's engine that its calls share."""

    def __init__(self, plan: Plan, num_lanes: int, num_kv_caches: int, angles: tuple[Array, Array]) -> None:
        """`angles`: by position, see `lane_calls.rotation_angles`."""
        self.plan = plan
        self.token = 0  # passes of the engine so far; never restarts, since epochs grow with it
        self.held = [0] * num_kv_caches  # positions in each KV cache
        self.settled = [0] * num_kv_caches  # and those that its state has: fewer where drafts of the last pass count
        self.drafted = [(0, 0)] * num_kv_caches  # number and position of the first draft of the last pass that chose
        self.replays: dict[tuple[int, int], Replay] = {}  # of each layer with a state, by the first lane of a call
        self.kv_cache = 0  # the one in use, where nobody names another
        self.parts: Sequence[PassPart] = ()  # of the pass
        self.spans: Sequence[Span] = ()  # of the same
        self.token_ids: list[int] = [0]  # of the pass
        self.reads = False  # whether the pass is of a prompt, and chooses nothing
        self.appended = [[0] * num_lanes for _ in range(plan.spec.num_layers)]  # pass that was, by layer and own lane
        self.word = 0  # what this rank says with the pass; rank 0's counts
        self.heard = 0  # what rank 0 has said, behind the pass
        self.all_logits: Array | None = None  # (tokens, vocab)
        self._angles = angles
        self.cos, self.sin = (table[:1] for table in angles)  # of the tokens of the pass

    def begin(self, parts: Sequence[PassPart], word: int = 0) -> None:
        """Start the next pass. Raises PlanError if the caller asks for a token or position that cannot follow."""
        self.reads = parts[0].sampling is None
        is_alone = len(parts) == 1
        if not is_alone and (len({part.cache for part in parts}) < len(parts) or any(part.sampling is None for part in parts)):
            raise PlanError("the parts of a pass are of different KV caches, and each chooses; a prompt has passes of its own")
        token_ids, spans = list[int](), list[Span]()
        for part in parts:
            self._check(part)
            part.first, part.chosen = len(token_ids), []
            spans.append(Span(part.cache, part.position, part.first, len(part.token_ids)))
            token_ids += part.token_ids
        self.token += 1
        self.parts, self.spans, self.token_ids = parts, spans, token_ids
        self.word, self.all_logits = word, None
        cos, sin = self._angles
        seen = [slice(span.position, span.position + span.num) for span in spans]
        if is_alone:
            self.cos, self.sin = cos[seen[0]], sin[seen[0]]
        else:
            self.cos, self.sin = (np.concatenate([table[one] for one in seen]) for table in (cos, sin))

    def _check(self, part: PassPart) -> None:
        spec, position, held, settled = self.plan.spec, part.position, self.held[part.cache], self.settled[part.cache]
        for token_id in part.token_ids:
            if not 0 <= token_id < spec.vocab_size:
                raise PlanError(f"token id {token_id} is outside the vocabulary of {spec.vocab_size}")
        if not 0 <= position <= held:
            raise PlanError(f"position {position} cannot follow: the KV cache holds {held} positions")
        if spec.is_recurrent and position not in (0, settled):
            raise PlanError(f"position {position} cannot follow a state of {settled} positions")
        last = position + len(part.token_ids) - 1
        if last >= spec.max_context:
            raise PlanError(f"position {last} exceeds the model's context of {spec.max_context}")

    def position_of(self, idx: int) -> int:
        """Of token `idx` of the pass."""
        return next(span.position + idx - span.first for span in self.spans if idx < span.first + span.num)
