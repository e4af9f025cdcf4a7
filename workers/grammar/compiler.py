"""From a JSON schema, a regular expression or a grammar to the mask of every next token (llguidance).

A `grammar` is JSON: `lark`, a grammar in llguidance's dialect of Lark, and `schemas`, what its rules `schema_0`, `schema_1`, ...
stand for. `<[N]>` in it is the token with that id.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kog_dist.late_numpy import NDArray, np
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Generate
from kog_dist.runtime.masks import MaskWords, num_words
from kog_dist.workers.grammar.bounds import Beyond, check_regex, check_schema
from kog_dist.workers.grammar.schemas import in_our_words, without_unknown_formats
from kog_dist.workers.grammar.thought import Thought

MAX_REASON_CHARS = 300
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # bounded, or a model may go on with blanks for ever
_TRIAL_TOKENS, _LONG_TRIAL_TOKENS, _MANY_REPEATS = 10, 120, 500  # the second number where a piece may come so often
_TRIAL_SEED, _LENGTHS = 1, (16, 8, 4, 2)  # bytes of long tokens
_NO_TEXT = "NoExtensionBias"  # all that the library says where nothing can come next
# Fuel is roughly time: 1,000,000 to build a lexer is 20 ms, 200,000 a step is 14 ms. A lexer state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class ConstraintKind(enum.StrEnum):
    """Which language a constraint is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    THOUGHT = "thought_end"  # nothing but that


class Constraint(NamedTuple):
    """What an answer must be, as the client wrote it, behind a thought that ends with the id `thought_end`, if there is one."""

    kind: ConstraintKind
    text: str = ""
    thought_end: int | None = None
    thought_tokens: int | None = None

    def as_message(self) -> dict[str, Any]:
        """For another process."""
        return {**self._asdict(), "kind": self.kind.value}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> Constraint:
        """The inverse; the message may have more."""
        return cls(ConstraintKind(message["kind"]), *(message[name] for name in cls._fields[1:]))


def constraint_of(message: Generate) -> Constraint | None:
    """The constraint of a request, if it has one."""
    thought = message.thought_end, message.thought_tokens
    for name in message.constraints:
        return Constraint(ConstraintKind(name), getattr(message, name), *thought)
    return None if message.thought_end is None else Constraint(ConstraintKind.THOUGHT, "", *thought)


class ConstraintError(Exception):
    """The constraint cannot be used; the text says why, and begins with its kind."""


class GrammarCompiler:
    """Compiles constraints for one vocabulary of `vocab_size` ids. Making it takes up to seconds for a large one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self.num_words = num_words(vocab_size)
        vocabulary = _Vocabulary(tokenizer, vocab_size)
        lengths = np.array([len(tokenizer.token_bytes(token_id)) for token_id in range(vocab_size)])
        self._texts = _mask_of(lengths > 0)  # tokens that have one
        self._longest = [_mask_of(lengths >= least) for least in _LENGTHS]
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )

    def why_not(self, constraint: Constraint) -> str | None:
        """Why a constraint cannot be used; None if it can. What the checker's clients are told."""
        try:
            self.check(constraint)
        except ConstraintError as error:
            return str(error)
        return None

    def check(self, constraint: Constraint) -> None:
        """Look at it, compile it, and go a little way through two answers. Raises ConstraintError if it cannot be used."""
        num_repeats = _check_bounds(constraint)
        if constraint.kind is ConstraintKind.THOUGHT:
            return
        matcher = self._compile(constraint)
        num_tokens = _LONG_TRIAL_TOKENS if num_repeats > _MANY_REPEATS else _TRIAL_TOKENS
        self._try_out(constraint.kind, matcher.copied(), num_tokens, self._longest)
        self._try_out(constraint.kind, matcher, _TRIAL_TOKENS, [])

    def _try_out(self, kind: ConstraintKind, matcher: Matcher, num_tokens: int, preferred: Sequence[MaskWords]) -> None:
        """What explodes mostly does within a few tokens. Of those that are allowed it takes one of the first mask of `preferred`
        in which there is any, or just any. `preferred`: masks of the whole vocabulary.
        """
        chance = np.random.default_rng(_TRIAL_SEED)
        for index in range(num_tokens):
            mask = matcher.mask()
            if not mask.any():
                raise ConstraintError(f"{kind} cannot be used: an answer could not go on behind token {index}: {matcher.error}")
            mask &= self._texts
            places = next((found for longer in preferred if (found := np.flatnonzero(mask & longer)).size), np.flatnonzero(mask))
            if not places.size:
                return
            place = int(chance.choice(places))
            bits = np.flatnonzero(np.unpackbits(mask[place : place + 1].view(np.uint8), bitorder="little"))
            matcher.accept(32 * place + int(chance.choice(bits)))

    def compile(self, constraint: Constraint) -> Matcher | Thought:
        """A matcher at the beginning of the answer. Raises ConstraintError."""
        answer = None if constraint.kind is ConstraintKind.THOUGHT else self._compile(constraint)
        if constraint.thought_end is None:
            assert answer is not None, "there is one of the two"
            return answer
        return Thought(self._texts, constraint.thought_end, constraint.thought_tokens, answer)

    def _compile(self, constraint: Constraint) -> Matcher:
        kind = constraint.kind
        grammar = self._grammar_of(constraint)
        matcher_class = self._library.LLMatcher
        library_matcher = matcher_class(self._tokenizer, grammar, log_level=0, limits=self._library.LLParserLimits(**_LIMITS))
        matcher = Matcher(library_matcher, self.num_words)
        if library_matcher.is_error():
            raise ConstraintError(f"{kind} cannot be used: {_reason(kind, library_matcher.get_error())}")
        if not matcher.mask().any():
            raise ConstraintError(f"{kind} cannot be used: {_reason(kind, library_matcher.get_error())}")
        return matcher

    def _grammar_of(self, constraint: Constraint) -> str:
        """In the library's own form."""
        matcher_class, (kind, text) = self._library.LLMatcher, constraint[:2]
        if kind is ConstraintKind.GRAMMAR:
            rules, schemas = _read_grammar(text)
            lark = "\n".join([rules, *(_rule(idx, schema) for idx, schema in enumerate(schemas))])
        elif kind is ConstraintKind.JSON_SCHEMA:
            grammar = self._grammar_of_schema(text)
            if constraint.thought_end is None:
                return grammar
            lark = f"start: /\\n{{0,2}}/ schema_0\n{_rule(0, json.loads(text))}"  # models have line ends behind a thought
        else:
            regex: str = matcher_class.grammar_from_regex(text)
            return regex
        try:
            found: str = matcher_class.grammar_from_lark(lark)
        except ValueError as error:
            raise ConstraintError(f"{kind} cannot be used: {_shortened(in_our_words(str(error)))}") from None
        return found

    def _grammar_of_schema(self, text: str) -> str:
        _read_schema(text)
        try:
            known = without_unknown_formats(text)
            grammar: str = self._library.LLMatcher.grammar_from_json_schema(known, {"whitespace_pattern": _WHITESPACE})
        except RecursionError:
            raise ConstraintError("json_schema is nested too deeply") from None
        except ValueError as error:
            raise ConstraintError(f"json_schema cannot be used: {_shortened(in_our_words(str(error)))}") from None
        return grammar


def _mask_of(chosen: NDArray[np.bool_]) -> MaskWords:
    """A mask of the ids that are chosen."""
    words = np.zeros(num_words(len(chosen)), np.uint32)
    packed = np.packbits(chosen, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


class Matcher:
    """Where an answer is in its grammar."""

    def __init__(self, library_matcher: Any, num_mask_words: int) -> None:
        self._matcher = library_matcher
        self._num_words = num_mask_words

    def copied(self) -> Matcher:
        """Another one, at the same place."""
        return Matcher(self._matcher.deep_copy(), self._num_words)

    def mask(self) -> MaskWords:
        """What may come next (num_words,); an end token where the answer is complete. All zero once a limit was passed."""
        if self._matcher.is_error():
            return np.zeros(self._num_words, np.uint32)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words].copy()
        if self._matcher.is_error():
            words[:] = 0
        return words

    def forced(self) -> list[int]:
        """Tokens that come next whatever is chosen: masks then allow no other. Those that the library knows of."""
        if self._matcher.is_error():
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

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


def _check_bounds(constraint: Constraint) -> int:
    """See bounds.py. Raises ConstraintError for what need not be compiled to be known as too much."""
    try:
        if constraint.kind is ConstraintKind.REGEX:
            return check_regex(constraint.text)
        if constraint.kind is ConstraintKind.GRAMMAR:
            return max(map(check_schema, _read_grammar(constraint.text)[1]), default=1)
        return check_schema(_read_schema(constraint.text)) if constraint.kind is ConstraintKind.JSON_SCHEMA else 1
    except Beyond as beyond:
        raise ConstraintError(f"{constraint.kind} cannot be used: {_shortened(str(beyond))}") from None


def _read_schema(text: str) -> dict[str, Any]:
    """The JSON object. Raises ConstraintError."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ConstraintError("json_schema is nested too deeply") from None
    except ValueError as error:
        raise ConstraintError(f"json_schema is not JSON: {_shortened(str(error))}") from None
    if not isinstance(schema, dict):
        raise ConstraintError("json_schema must be a JSON object")
    return schema


def _read_grammar(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Its rules and its schemas. Raises ConstraintError."""
    try:
        parsed = json.loads(text)
        lark, schemas = parsed["lark"], parsed["schemas"]
        return str(lark), [dict(schema) for schema in schemas]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConstraintError(f"grammar is no JSON with lark and schemas: {_shortened(str(error))}") from None


def _rule(idx: int, schema: dict[str, Any]) -> str:
    """The rule of a schema."""
    guidance = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"schema_{idx}: %json {json.dumps(json.loads(without_unknown_formats(json.dumps(schema))) | guidance)}"


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
