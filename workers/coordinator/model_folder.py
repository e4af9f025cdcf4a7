"""What the coordinator knows of the model it serves, and the check that every request must pass before ranks see it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import CheckpointError, RequestError
from kog_dist.late_numpy import np
from kog_dist.model.generation_config import read_eos_ids, read_sampling_defaults
from kog_dist.model.published_config import spec_of_folder
from kog_dist.model.spec import ModelSpec
from kog_dist.model.tokenizer import Tokenizer, text_unavailable
from kog_dist.records import dataclass
from kog_dist.rpc.messages import ErrorCode, Generate
from kog_dist.sampling_params import GREEDY, SamplingParams
from kog_dist.speculation import Speculation
from kog_dist.workers.grammar.compiler import constraint_of

DEFAULT_MAX_TOKENS = 256
_FEW_IDS = 256
MAX_BYTES_PER_TOKEN = 64  # a text with more bytes per token of context than this is refused before it is tokenized


@dataclass(frozen=True)
class ModelFolder:
    """Shape and tokenizer of a model folder. Without a tokenizer only token ids are taken."""

    name: str  # what users call it
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    own_sampling: SamplingParams = GREEDY  # what HTTP uses where a request says nothing; RPC is greedy then
    speculate: Speculation | None = None  # for requests that do not say; None: the ranks have no drafts

    @classmethod
    def from_folder(cls, folder: Path, name: str, context: int = 0, speculate: str = "") -> ModelFolder:
        """Read config.json, tokenizer and generation_config.json, for `context` tokens (0: the model's).

        Raises CheckpointError naming the file.
        """
        spec = spec_of_folder(folder).with_context(context)
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is not None:
            tokenizer.check_fits(spec.vocab_size)
        eos_ids = tokenizer.eos_ids if tokenizer is not None else read_eos_ids(folder)
        if (largest := max(eos_ids, default=0)) >= spec.vocab_size:
            raise CheckpointError(
                f"{folder}: eos_token_id {largest} in generation_config.json or config.json is no id of the model, "
                f"whose vocabulary ends at {spec.vocab_size - 1}"
            )
        asked = Speculation(speculate) if speculate else None
        return cls(name, folder, spec, tokenizer, eos_ids, read_sampling_defaults(folder), asked)

    def admit(self, message: Generate) -> DecodeRequest:
        """The request as ranks will see it. Raises RequestError with the code that the client gets."""
        if message.stop and self.tokenizer is None:
            raise RequestError(
                ErrorCode.NO_TOKENIZER, f"{self.name} has no tokenizer, so no stop string can ever occur; omit stop"
            )
        self._check_constraint(message)
        prompt_ids = self._prompt_ids(message)
        context = self.spec.max_context
        if not prompt_ids:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens; give at least one")
        room = context - len(prompt_ids)
        if room < 1:
            raise _too_long(f"the prompt has {len(prompt_ids)} tokens and the context {context}: no room for an answer")
        max_tokens = message.max_tokens if message.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        if max_tokens == 0 and len(prompt_ids) == 1:
            reason = "the only token of the prompt has no log-probability, and max_tokens is 0: there is nothing to do"
            raise RequestError(ErrorCode.INVALID_REQUEST, reason)
        if max_tokens > room:
            raise _too_long(
                f"{len(prompt_ids)} prompt tokens and max_tokens {max_tokens} exceed the context of {context} tokens; "
                f"ask for at most {room}"
            )
        return DecodeRequest(
            prompt=prompt_ids,
            max_tokens=max_tokens,
            sampling=self._checked(message.sampling, max_tokens),
            stop_ids=self.eos_ids,
            ignore_eos=message.ignore_eos,
            logit_digests=message.logit_digests,
            drafts=self._drafts(message),
            prediction=self._prediction(message.prediction_ids or ()),
        )

    def _drafts(self, message: Generate) -> bool:
        if self.speculate is None:
            if message.speculate is Speculation.LOOKUP:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST,
                    "speculate lookup needs an engine that has drafts, and this one has none: kog-launch --dry-run says why; "
                    "leave it out",
                )
            return False
        return (message.speculate or self.speculate) is not Speculation.OFF

    def recalls(self, speculate: Speculation | None) -> bool:
        """Whether drafts of a request that says so come from earlier answers, too."""
        return self.speculate is not None and (speculate or self.speculate) is Speculation.AUTO

    def _prediction(self, ids: Sequence[int]) -> Sequence[int]:
        """As much of it as may come: it changes no answer, so that nothing of it is refused."""
        ids = ids[: self.spec.max_context]
        words = _words_below(self.spec.vocab_size, ids)
        if words is not None:
            return words
        return ids[: next(idx for idx, token_id in enumerate(ids) if not 0 <= token_id < self.spec.vocab_size)]

    def check_text(self, message: Generate) -> Tokenizer:
        """What reads the text of a request. Raises RequestError if nothing does, or if it is too long before it is read."""
        if self.tokenizer is None:
            raise text_unavailable(self.folder)
        num_bytes, most = len((message.prompt or "").encode()), MAX_BYTES_PER_TOKEN * self.spec.max_context
        if num_bytes > most:
            raise _too_long(f"the prompt has {num_bytes} bytes, at most {most} can fit {self.spec.max_context} tokens of context")
        return self.tokenizer

    def _check_constraint(self, message: Generate) -> None:
        """Refuse what no grammar could help; the grammar itself is checked elsewhere (workers/grammar)."""
        constraint = constraint_of(message)
        if constraint is None:
            return
        if self.tokenizer is None:
            raise RequestError(ErrorCode.NO_TOKENIZER, f"{self.name} has no tokenizer, so {constraint.kind} means nothing to it")
        if message.thought_end is not None and message.thought_end >= self.spec.vocab_size:
            raise RequestError(
                ErrorCode.TOKEN_ID_OUT_OF_RANGE,
                f"thought_end is id {message.thought_end}, the vocabulary has ids 0 to {self.spec.vocab_size - 1}",
            )
        if message.ignore_eos:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"ignore_eos and {constraint.kind} exclude each other: the end of a grammar is the end"
            )
        if not self.eos_ids:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"{self.name} has no end-of-sequence token, with which an answer of {constraint.kind} ends",
            )

    def _checked(self, sampling: SamplingParams, max_tokens: int) -> SamplingParams:
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < self.spec.vocab_size:
                raise RequestError(
                    ErrorCode.TOKEN_ID_OUT_OF_RANGE,
                    f"logit_bias names id {token_id}, the vocabulary has ids 0 to {self.spec.vocab_size - 1}",
                )
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"min_tokens is {sampling.min_tokens} and max_tokens {max_tokens}; ask for no more"
            )
        return sampling

    def _prompt_ids(self, message: Generate) -> Sequence[int]:
        if (ids := message.prompt_ids) is not None:
            if (words := _words_below(self.spec.vocab_size, ids)) is not None:
                return words
            idx = next(idx for idx, token_id in enumerate(ids) if not 0 <= token_id < self.spec.vocab_size)
            raise RequestError(
                ErrorCode.TOKEN_ID_OUT_OF_RANGE,
                f"prompt_ids[{idx}] is {ids[idx]}, the vocabulary has ids 0 to {self.spec.vocab_size - 1}",
            )
        tokenizer = self.check_text(message)
        assert message.prompt is not None, "a Generate message has one of the two"
        try:
            return tokenizer.encode(message.prompt)
        except RequestError:
            raise
        except BaseException as error:  # the library's panics derive from BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the tokenizer cannot read the prompt: {error!s:.200}") from None


def _words_below(limit: int, ids: Sequence[int]) -> array[int] | None:
    """The ids as 32-bit words if 0 <= id < `limit` for all of them. Of many, numpy finds the largest sooner; where it has not run
    for a while, it takes 50 us.
    """
    try:
        words = ids if isinstance(ids, array) else array("I", ids)
    except OverflowError:
        return None
    if len(words) <= _FEW_IDS:
        return None if max(words, default=0) >= limit else words
    return None if int(np.maximum.reduce(np.frombuffer(words, np.uint32))) >= limit else words


def _too_long(message: str) -> RequestError:
    return RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
