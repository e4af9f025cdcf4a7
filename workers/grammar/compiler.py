"""From a JSON schema or a regular expression to the mask of every next token (llguidance)."""

from __future__ import annotations

import enum
import json
from typing import Any, NamedTuple

import numpy as np

from kog_dist.decode.masks import MaskWords, num_words
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Generate
from kog_dist.workers.grammar.schemas import in_our_words, without_unknown_formats

MAX_REASON_CHARS = 300
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # bounded, or a model may go on with blanks for ever
_NO_TEXT = "NoExtensionBias"  # all that the library says where nothing can come next
# Fuel is roughly time: 1,000,000 to build a lexer is 20 ms, 200,000 a step is 14 ms. A lexer state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
    "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False,
}  # fmt: skip


class ConstraintKind(enum.StrEnum):
    """Which language a constraint is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


class Constraint(NamedTuple):
    """What an answer must be, as the client wrote it."""

    kind: ConstraintKind
    text: str


def constraint_of(message: Generate) -> Constraint | None:
    """The constraint of a request, if it has one."""
    if message.json_schema is not None:
        return Constraint(ConstraintKind.JSON_SCHEMA, message.json_schema)
    return None if message.regex is None else Constraint(ConstraintKind.REGEX, message.regex)


class ConstraintError(Exception):
    """The constraint cannot be used; the text says why, and begins with its kind."""


class GrammarCompiler:
    """Compiles constraints for one vocabulary of `vocab_size` ids. Making it takes up to seconds for a large one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self.num_words = num_words(vocab_size)
        vocabulary = _Vocabulary(tokenizer, vocab_size)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of the answer. Raises ConstraintError."""
        kind, text = constraint
        matcher_class = self._library.LLMatcher
        grammar = self._grammar_of_schema(text) if kind is ConstraintKind.JSON_SCHEMA else matcher_class.grammar_from_regex(text)
        library_matcher = matcher_class(
            self._tokenizer, grammar, log_level=0, limits=self._library.LLParserLimits(**_LIMITS)
        )  # fmt: skip
        matcher = Matcher(library_matcher, self.num_words)
        if library_matcher.is_error():
            raise ConstraintError(f"{kind} cannot be used: {_reason(kind, library_matcher.get_error())}")
        if not matcher.mask().any():
            raise ConstraintError(f"{kind} cannot be used: {_reason(kind, library_matcher.get_error())}")
        return matcher

    def _grammar_of_schema(self, text: str) -> str:
        try:
            if not isinstance(json.loads(text), dict):
                raise ConstraintError("json_schema must be a JSON object")
        except RecursionError:
            raise ConstraintError("json_schema is nested too deeply") from None
        except ValueError as error:
            raise ConstraintError(f"json_schema is not JSON: {_shortened(str(error))}") from None
        try:
            known = without_unknown_formats(text)
            grammar: str = self._library.LLMatcher.grammar_from_json_schema(known, {"whitespace_pattern": _WHITESPACE})
        except RecursionError:
            raise ConstraintError("json_schema is nested too deeply") from None
        except ValueError as error:
            raise ConstraintError(f"json_schema cannot be used: {_shortened(in_our_words(str(error)))}") from None
        return grammar


class Matcher:
    """Where an answer is in its grammar."""

    def __init__(self, library_matcher: Any, num_mask_words: int) -> None:
        self._matcher = library_matcher
        self._num_words = num_mask_words

    def mask(self) -> MaskWords:
        """What may come next (num_words,); an end token where the answer is complete. All zero once a limit was passed."""
        if self._matcher.is_error():
            return np.zeros(self._num_words, np.uint32)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words].copy()
        if self._matcher.is_error():
            words[:] = 0
        return words

    def accept(self, token_id: int) -> None:
        """Go on with a token that the mask allowed."""
        self._matcher.consume_token(token_id)

    @property
    def error(self) -> str:
        """Why every mask is zero now; empty if it is not so."""
        return _shortened(self._matcher.get_error())


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every id. A special token has none, and a name that no text contains."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None
        texts = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id, text in enumerate(texts) if not text]
        self.tokens = [text or b"\xff[%d]" % token_id for token_id, text in enumerate(texts)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _reason(kind: ConstraintKind, complaint: str) -> str:
    """What the library says, or what that means where no text satisfies the constraint."""
    if complaint and not complaint.startswith(_NO_TEXT):
        return _shortened(in_our_words(complaint))
    if kind is ConstraintKind.JSON_SCHEMA:
        return 'no text satisfies it; a $ref that leads only to itself is a reason, as in {"$ref": "#"}'
    return "no text satisfies it"


def _shortened(reason: str) -> str:
    """On one line, printable, and not longer than a sentence may be."""
    line = " ".join(reason.split()).encode("ascii", "backslashreplace").decode()
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."
