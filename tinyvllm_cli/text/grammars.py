"""Constraints compiled by llguidance: which tokens an answer may go on with, for many answers at a time."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.text.choices import choice_grammar
from tinyvllm_cli.text.deep_stack import deeply
from tinyvllm_cli.text.lark_check import prepare_grammar
from tinyvllm_cli.text.patterns import choice_pattern, refuse_pattern
from tinyvllm_cli.text.schema_check import SchemaError, prepare_schema
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import U32, Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer as CoreTokenizer

PARALLEL_FROM = 32  # answers: for fewer, threads take longer to wake up than they save
KEPT = 64  # compiled constraints; one takes some 100 KB, more the more of its states answers have been in
REASON_CHARS = 200


class Grammars:
    """The constraints of one model's answers.

    eos_token_ids: each is allowed where an answer may end, and nowhere else. vocab_size: the model's, the bits of a
    mask. Ids past the tokenizer's and control words are in no mask. threads: of fill() and advance(), which a thread
    may call while another calls matcher().
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int], vocab_size: int, threads: int = 1) -> None:
        from llguidance import LLExecutor

        self.words = -(-vocab_size // 32)  # of a mask
        self._threads = threads
        self._executor = LLExecutor(num_threads=threads)
        eos = sorted(id for id in eos_token_ids if 0 <= id < min(tokenizer.size, vocab_size))
        # llguidance must have one: without any, the last id stands in for it, and the masks are without this id.
        self._tokens = _library_tokenizer(tokenizer, eos or [tokenizer.size - 1], vocab_size)
        self._find_allowed = partial(_allowed, tokenizer, eos, vocab_size)
        self._grammar_of = partial(_library_grammar, tokenizer, vocab_size)
        self._library_words = -(-self._tokens.vocab_size // 32)
        self._fits = self._library_words == self.words and tokenizer.size <= vocab_size and bool(eos)
        self._compiled: OrderedDict[Constraint, _Compiled | str] = OrderedDict()  # or why it cannot be

    def check(self, constraint: Constraint) -> None:
        """RequestError invalid_schema where a constraint is wrong, or not supported."""
        self._of(constraint)

    def matcher(self, constraint: Constraint) -> Matcher:
        """For a fresh answer. RequestError as check()."""
        return Matcher(self, constraint, self._of(constraint))

    def _of(self, constraint: Constraint) -> _Compiled:
        """A constraint, compiled where it has not been lately."""
        compiled = self._compiled.pop(constraint, None)
        if compiled is None:
            compiled = deeply(partial(self._compile, constraint))
        self._compiled[constraint] = compiled
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        if isinstance(compiled, str):
            raise RequestError("invalid_schema", f"{constraint.field} {compiled}", constraint.field)
        return compiled

    def fill(self, matchers: Sequence[Matcher | None], bits: U32) -> dict[int, RequestError]:
        """Which ids may come next, of unfinished answers that differ: bit id % 32 of word id / 32 of row i says it
        for matchers[i]; None: whatever it says. bits: [at least len(matchers), words], rows in one piece of memory;
        further ones stay.

        Returns the error invalid_schema of each answer that cannot go on, by its row, in which all bits are 0.
        """
        if bits.shape[1:] != (self.words,) or len(bits) < len(matchers) or not bits.flags.c_contiguous:
            raise ValueError(f"bits are {bits.shape}, wanted at least {len(matchers)} whole rows of {self.words} words")
        rows = bits[: len(matchers)]
        target = rows if self._fits else np.zeros((len(rows), self._library_words), np.uint32)
        # Those of one lane lie together, for one thread: they share a lock.
        given = sorted([(matcher.lane, i, matcher) for i, matcher in enumerate(matchers) if matcher is not None])
        self._compute([(matcher.core, i) for _, i, matcher in given], target)
        errors = {}
        for _, i, matcher in given:
            if matcher.core.is_error():
                try:
                    matcher.revive()
                    self._compute([(matcher.core, i)], target)
                    matcher.refuse_broken()
                except RequestError as error:
                    errors[i] = error
                    target[i] = 0
        if not self._fits:
            rows[:] = target[:, : self.words] & self._allowed
            for _, i, matcher in given:
                if i not in errors and not rows[i].any():
                    errors[i] = matcher.stuck("the model has no token for what may follow")
        elif loose := [i for _, i, matcher in given if matcher.is_loose]:
            rows[loose] &= self._allowed
        return errors

    def advance(self, steps: Sequence[tuple[Matcher, int]]) -> list[bool | RequestError]:
        """Answers that differ go on, each with an id that its mask has: of each whether it has finished, or the error
        invalid_schema where it cannot go on."""
        if len(steps) < PARALLEL_FROM:
            taken = [matcher.core.consume_token(token_id) for matcher, token_id in steps]
        else:
            taken = self._executor.consume_token_par([(matcher.core, token_id) for matcher, token_id in steps])
        outcomes: list[bool | RequestError] = []
        for (matcher, token_id), whole in zip(steps, taken, strict=True):
            matcher.token_ids.append(token_id)
            core = matcher.core
            if whole and not core.is_error():  # one in error takes EOS
                outcomes.append(core.is_stopped())
                continue
            try:
                matcher.revive()
                outcomes.append(matcher.finished)
            except RequestError as error:
                outcomes.append(error)
        return outcomes

    @cached_property
    def _allowed(self) -> U32:
        """The ids that any answer may have, as a mask."""
        return self._find_allowed()

    def _compute(self, pairs: list[tuple[LLMatcher, int]], target: U32) -> None:
        if pairs:  # the library takes none for a mistake
            self._executor.unsafe_compute_mask_ptr(pairs, target.ctypes.data, 4 * self._library_words, len(target))

    def _compile(self, constraint: Constraint) -> _Compiled | str:
        try:
            compiled = _Compiled(self._tokens, self._grammar_of(constraint), self._threads)
            compiled.check()
        except SchemaError as error:
            return str(error)
        if not self._fits and self.fill([Matcher(self, constraint, compiled)], np.zeros((1, self.words), np.uint32)):
            return "cannot begin: the model has no token for it"
        return compiled


class _Compiled:
    """A constraint as llguidance holds it: once for each lane, since copies of one share a lock and what they find."""

    def __init__(self, tokens: LLTokenizer, grammar: str, lanes: int) -> None:
        self._tokens = tokens
        self._grammar = grammar
        self._bases: list[LLMatcher | None] = [None] * lanes
        self._next = 0

    def next_lane(self) -> int:
        lane = self._next
        self._next = (lane + 1) % len(self._bases)
        return lane

    def copy(self, lane: int, *, fresh: bool = False) -> LLMatcher:
        """At the start of an answer. fresh: that finds all anew."""
        from llguidance import LLMatcher

        base = self._bases[lane]
        if base is None or fresh:
            base = self._bases[lane] = deeply(partial(LLMatcher, self._tokens, self._grammar, log_level=0))
        return base.deep_copy()

    def check(self) -> None:
        """SchemaError where it is wrong, or where there is no answer that it allows."""
        core = self.copy(0)
        if core.is_error():
            raise SchemaError(_refusal(_reason(core.get_error())))
        core.compute_bitmask()  # shows what cannot begin
        if core.is_error():
            raise SchemaError("allows no answer")


class Matcher:
    """One answer's place in its constraint. grammars.fill() gives its masks; Grammars.matcher() makes it."""

    def __init__(self, grammars: Grammars, constraint: Constraint, compiled: _Compiled) -> None:
        self.constraint = constraint
        self.is_loose = constraint.kind == "grammar"  # "anything but" of a grammar has control words too
        self.lane = compiled.next_lane()
        self.core = compiled.copy(self.lane)
        self._grammars = grammars
        self._compiled = compiled
        self.token_ids: list[int] = []  # of the answer

    @property
    def finished(self) -> bool:
        """Nothing but EOS can follow, or EOS came."""
        return bool(self.core.is_stopped()) and not self.is_broken()

    def fill(self, row: U32) -> None:
        """The mask of this answer alone, row: [words]. RequestError invalid_schema where it cannot go on."""
        for error in self._grammars.fill([self], row[None]).values():
            raise error

    def advance(self, token_id: int) -> None:
        """The answer goes on with an id that its mask has. RequestError invalid_schema for another."""
        for outcome in self._grammars.advance([(self, token_id)]):
            if isinstance(outcome, RequestError):
                raise outcome

    def forced(self) -> list[int]:
        """The ids that follow with no choice: of each, the mask in its place has this bit alone. EOS is none."""
        return [] if self.core.is_stopped() else self.core.compute_ff_tokens()

    def is_broken(self) -> bool:
        """In error: llguidance then allows EOS, as if the answer were whole."""
        return self.core.is_error()

    def revive(self) -> None:
        """Begin anew, and come back to this place: what copies of one base share has a limit, and whether an answer
        can be must not depend on the answers before it. RequestError as refuse_broken().
        """
        self.core = self._compiled.copy(self.lane, fresh=True)
        self.core.consume_tokens(self.token_ids)
        self.refuse_broken()

    def refuse_broken(self) -> None:
        """RequestError invalid_schema where the answer cannot go on."""
        if self.is_broken():
            raise self.stuck(_reason(self.core.get_error()) or "nothing is allowed there")

    def stuck(self, reason: str) -> RequestError:
        """The error of an answer that cannot go on."""
        name = self.constraint.field
        message = f"{name} cannot be followed after {len(self.token_ids)} tokens ({reason})"
        return RequestError("invalid_schema", message, name)


def refuse_wrong(constraint: Constraint) -> None:
    """RequestError invalid_schema where a constraint is wrong whatever the model: what Grammars.check() finds, but for
    what only tokens show."""
    if reason := deeply(partial(_wrong, constraint)):
        raise RequestError("invalid_schema", f"{constraint.field} {reason}", constraint.field)


def _wrong(constraint: Constraint) -> str | None:
    from llguidance import LLMatcher

    try:
        grammar = _own_grammar(constraint)
    except SchemaError as error:
        return str(error)
    message = "" if grammar is None else LLMatcher.validate_grammar(grammar)
    return _refusal(_reason(message)) if message else None


def _own_grammar(constraint: Constraint) -> str | None:
    """As llguidance reads it; None of choices, which are spelt in the tokens of a model."""
    from llguidance import LLMatcher, regex_to_lark

    source = constraint.source
    if constraint.kind == "choice":
        return None
    if constraint.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(prepare_schema(json.loads(source))))
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(prepare_grammar(source))
    if reason := refuse_pattern(source):
        raise SchemaError(f"is {shortened(repr(source))}, {reason}")
    # \d and \w as in the patterns of JSON schemas, which are ECMAScript's: ASCII
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source, 'dw')}/")


def _library_grammar(tokenizer: Tokenizer, vocab_size: int, constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if (own := _own_grammar(constraint)) is not None:
        return own
    texts = json.loads(constraint.source)
    grammar = choice_grammar(tokenizer, texts, vocab_size)
    if grammar is None:
        return LLMatcher.grammar_from_regex(choice_pattern(texts))
    return LLMatcher.grammar_from_lark(grammar)


def _reason(error: str) -> str:
    """The one line of llguidance's message that says what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "".join(lines[:1]))
    return shortened(told)


def shortened(text: str) -> str:
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 3] + "..."


def _refusal(reason: str) -> str:
    """Why a constraint is not compiled, as the rest of a sentence that begins with the name of the field."""
    if reason.startswith("oneOf"):
        return "has oneOf of schemas which neither types nor a constant that each requires tell apart, wanted anyOf"
    nothing = "Unsatisfiable schema: "
    if reason.startswith(nothing):
        return f"allows no answer: {reason.removeprefix(nothing)}"
    return f"is not supported, or wrong: {reason}"


def _allowed(tokenizer: Tokenizer, eos: Collection[int], vocab_size: int) -> U32:
    """As a mask, the ids of text and EOS."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    for id in range(min(tokenizer.size, vocab_size)):
        bits[id] = bool(tokenizer.token_bytes(id))
    if not eos and tokenizer.size <= vocab_size:
        bits[tokenizer.size - 1] = 0
    bits[list(eos)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _library_tokenizer(tokenizer: Tokenizer, eos: list[int], vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    size = max(tokenizer.size, vocab_size)
    return LLTokenizer(_without_names(tokenizer.core), n_vocab=size, eos_token=eos)


def _without_names(core: CoreTokenizer) -> str:
    """The tokenizer as JSON, with names for its added tokens that no text has: spelt in an answer they are text, of
    other ids, for llguidance takes each of them for a control word."""
    state = json.loads(core.to_str())
    nonce = secrets.token_hex(16)
    names = {token["content"]: f"<|{nonce}.{token['id']}|>" for token in state["added_tokens"]}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    else:  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    state["post_processor"] = None  # it names them too, and only adds them
    return json.dumps(state)
