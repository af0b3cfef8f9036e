"""Turns of one run with the exact token ids that the model read and wrote, which later prompts continue.

Tokenizing an answer's text again may give other ids than the model sampled. So a turn keeps its rendered prompt and its
ids. If the text of a later prompt continues a turn (up to white space beside marks), its ids are the turn's ids plus
those of the following text. If the template renders the turn differently once others follow (it drops the reasoning, or
rewrites a tool call), a new sequence begins: a fork. Pure: works on texts and ids, without messages and engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity_es.actors.rollout.conversation.answer_comparison import Fit

__all__ = ["Marks", "Turn", "Turns"]

Ids = np.ndarray[Any, np.dtype[np.int32]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]

_MARK = re.compile(r"(</?[^<>\s]+>|\[/?[A-Z_]+\])")
"""Marks between the parts of an answer: `<tool_call>`, `</think>`, `[TOOL_CALLS]`."""
_NO_REASONING = re.compile(r"<think>\s*</think>")
_BLANK = re.compile(rf"(?:\s|{_NO_REASONING.pattern})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Texts that a chat template writes around an answer."""

    asks: str = ""
    """Text with which a prompt asks for an answer."""
    opens: str = ""
    """White space before a finished answer."""
    closes: str | None = None
    """Text after an answer that other messages follow; None if unknown."""
    ends: str | None = None
    """Text after an answer that is the last message; None if unknown."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model, with its prompt."""

    rendered: str | None
    """The prompt as the chat template rendered it; None if the prompt was not a chat."""
    text: str
    """The answer as the client got it, perhaps without special tokens."""
    tokens: Ids
    begin: int
    logprobs: Numbers | None
    info: Mapping[str, Any]
    """From the turn's experience: `version_spans`, `adapter_spans`, `splices` over the answer's tokens; `sampling`."""
    previous: Turn | None
    """Earlier turn whose tokens the prompt begins with."""
    is_cut: bool = False
    """True if the answer was cut off at its maximum length or at the end of the context."""
    is_followed: bool = False
    """True if another turn continues this one."""
    has_experience: bool = False
    """True if an experience was made of a conversation that ends with this turn."""
    prompt_text: str | None = None
    """Text of the prompt's ids; None if they were not decoded."""
    decoded_texts: tuple[str, str] | None = None
    """Decoded text of all the answer's tokens, and of all but the last, with special tokens; set on first use."""

    def chain(self) -> list[Turn]:
        """Return the turns of the sequence that ends with this one, oldest first."""
        turns, turn = [self], self.previous
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


class Turns:
    """The turns of one run, and the number of its forks.

    `encode` returns the ids of a text that contains its special tokens; `decode` is the inverse. `marks` is called at
    most once, when a prompt may continue a turn.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str], marks: Callable[[], Marks]
    ) -> None:
        self.encode, self.decode, self._read_marks = encode, decode, marks
        self._marks: Marks | None = None
        self._turns: list[Turn] = []
        self._by_length: dict[int, dict[int, list[Turn]]] = {}
        """Turns by number of tokens, then by hash of the tokens."""
        self._forked_prompts: set[str] = set()

    @property
    def marks(self) -> Marks:
        self._marks = self._read_marks() if self._marks is None else self._marks
        return self._marks

    @property
    def forks(self) -> int:
        """Number of prompts in which the template or the client changed an earlier answer."""
        return len(self._forked_prompts)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def clear(self) -> None:
        self._turns, self._by_length = [], {}

    def prompt(self, rendered: str, earlier_prompts: Callable[[], Iterable[str]] | None = None) -> list[int] | None:
        """Return the ids of a chat's prompt if it continues a turn; None if it begins a conversation or is a fork.

        `rendered`: the prompt's text. `earlier_prompts`: returns the prompts before each answer in its messages, newest
        first, which shows if the prompt is a fork or another conversation. Without it, a prompt is a fork if it begins
        like an earlier prompt and asks for a further answer.
        """
        if not self._turns:
            return None
        continued = self._continued_turn(rendered)
        if self._is_fork(rendered, continued, earlier_prompts):
            self._forked_prompts.add(rendered)
        if continued is None:
            return None
        turn, tail = continued
        return [*turn.tokens.tolist(), *self._tail_ids(turn, tail)]

    def turn_before(self, prompt: Sequence[int] | Ids) -> Turn | None:
        """Return the longest turn whose exact tokens begin a prompt; of equal turns the last that no turn follows."""
        ids = np.asarray(prompt, dtype=np.int32)
        for length in sorted((n for n in self._by_length if n <= len(ids)), reverse=True):
            turns = self._by_length[length].get(_hash(ids[:length]), ())
            equal = [t for t in turns if np.array_equal(t.tokens, ids[:length])]  # hashes may collide
            if equal:
                return next((t for t in reversed(equal) if not t.is_followed), equal[-1])
        return None

    def turn_of(self, tokens: Sequence[int], begin: int) -> Turn | None:
        """Return the turn with exactly these tokens, sampled from `begin` on; None if there is none."""
        ids = np.asarray(tokens, dtype=np.int32)
        turns = self._by_length.get(len(ids), {}).get(_hash(ids), ())
        return next((t for t in reversed(turns) if t.begin == begin and np.array_equal(t.tokens, ids)), None)

    def record(
        self, rendered: str | None, prompt: Sequence[int] | Ids, sampled: Sequence[int] | Ids,
        logprobs: Numbers | None, text: str, info: Mapping[str, Any] | None = None, previous: Turn | None = None,
        is_cut: bool = False, prompt_text: str | None = None,
    ) -> Turn:
        """Record an answer and return its turn. `previous` is what `turn_before` returned for `prompt`."""
        ids = np.concatenate((prompt, sampled), dtype=np.int32, casting="unsafe")
        if previous is not None:
            previous.is_followed = True
        turn = Turn(
            rendered=rendered, text=text, tokens=ids, begin=len(prompt), logprobs=logprobs, info=info or {},
            previous=previous, is_cut=is_cut, prompt_text=prompt_text,
        )
        self._turns.append(turn)
        self._by_length.setdefault(len(ids), {}).setdefault(_hash(ids), []).append(turn)
        return turn

    def last_turn(self, rendered: str, prompt: str, fit_of: Callable[[Collection[str]], Fit]) -> Turn | None:
        """Return the turn of a conversation's last answer; None if it was not sampled here, or several turns may be it.

        Of turns with equal texts, one without an experience is preferred. `rendered`: text of the conversation up to
        that answer; `prompt`: text of the prompt before it; `fit_of` compares the client's message with a turn
        that has these texts (without and with special tokens).
        """
        candidates = [(fit_of(self._texts(turn)), turn) for turn in self._turns if turn.rendered == prompt]
        best = max((fit for fit, _ in candidates), default=Fit.NONE)
        if best is Fit.NONE:
            continued = self._continued_turn(rendered)
            return continued[0] if continued is not None and continued[1] == self.marks.ends else None
        turns = [turn for fit, turn in candidates if fit is best]
        if best is Fit.PART and len({turn.text.strip() for turn in turns}) > 1:
            return None
        return next((turn for turn in turns if not turn.has_experience), turns[-1])

    def end_of(self, turn: Turn) -> str:
        """Return the text of the token that ended an answer, which `turn.text` lacks; empty if it was cut off."""
        whole, without_last = self._decoded_texts(turn)
        last = whole.removeprefix(without_last) if whole.startswith(without_last) else "\ufffd"
        # Part of a character is no end token, though an engine may have held it back.
        return "" if "\ufffd" in last or turn.text.endswith(last) else last

    def text_through(self, turn: Turn) -> str | None:
        """Return the text of a turn's prompt and answer; None if unknown, or if one may end within a character."""
        texts = [turn.prompt_text, self._decoded_texts(turn)[0]]
        known = [text for text in texts if text is not None and not text.endswith("\ufffd")]
        return "".join(known) if len(known) == 2 else None

    def _decoded_texts(self, turn: Turn) -> tuple[str, str]:
        """Return the decoded text of all an answer's tokens, and of all but the last, with special tokens."""
        if turn.decoded_texts is None:
            sampled = turn.tokens[turn.begin :].tolist()
            turn.decoded_texts = self.decode(sampled), self.decode(sampled[:-1])
        return turn.decoded_texts

    # --- continuations of a turn --------------------------------------------------------------------------------------
    def _continued_turn(self, rendered: str) -> tuple[Turn, str] | None:
        """Return the turn that a prompt's text continues, and the text after its answer; None if there is none.

        Longer prompts go first, then answers whose white space matches too.
        """
        candidates = [t for t in self._turns if t.rendered is not None and rendered.startswith(t.rendered)]
        for length, group in itertools.groupby(sorted(candidates, key=_length, reverse=True), key=_length):
            turns, after_prompt = list(group), rendered[length:]
            for tail_of in (self._text_after_answer, self._text_after_respaced_answer):
                tails = [(turn, tail) for turn in turns if (tail := tail_of(turn, after_prompt)) is not None]
                if tails:
                    return max(tails, key=lambda pair: _rank(*pair))
        return None

    def _text_after_answer(self, turn: Turn, after_prompt: str) -> str | None:
        """Return what follows the turn's answer in `after_prompt`, the text after the turn's prompt.

        None if another answer follows the prompt. White space around the answer does not matter.
        """
        if after_prompt == "":
            return None  # the same prompt again
        end = self.end_of(turn)
        for text in self._texts(turn):
            core = text.strip()
            leading_white = text[: len(text) - len(text.lstrip())]
            trailing_white = text[len(text.rstrip()) :] if core else ""
            for opening in dict.fromkeys((leading_white, "", self.marks.opens)):
                if not after_prompt.startswith(opening + core):
                    continue
                tail_with_white = after_prompt[len(opening) + len(core) :]
                for tail in dict.fromkeys((tail_with_white.removeprefix(trailing_white), tail_with_white)):
                    if self._can_follow_answer(tail, end):
                        return tail
        return None

    def _text_after_respaced_answer(self, turn: Turn, after_prompt: str) -> str | None:
        """Like `_text_after_answer`, but ignore white space and blank reasoning between the parts of an answer.

        Clients strip the text before a tool call, drop it if it is blank, and add blank reasoning. Templates write
        their own white space between the parts of an answer.
        """
        end = self.end_of(turn)
        for text in self._texts(turn) if after_prompt else ():
            position = _end_of_answer(text, after_prompt)
            if position is not None:
                for tail in (after_prompt[position:], after_prompt[_past_blank(after_prompt, position) :]):
                    if self._can_follow_answer(tail, end):
                        return tail
        return None

    def _texts(self, turn: Turn) -> Collection[str]:
        """Return the texts that a client may send back: `turn.text`, and the text with special tokens but the end."""
        whole = self._decoded_texts(turn)[0].removesuffix(self.end_of(turn))
        return dict.fromkeys((turn.text, whole)).keys()

    def _can_follow_answer(self, tail: str, end: str) -> bool:
        """Return True if `tail` can follow a whole answer: it begins with the turn's `end` text, or the template's."""
        if tail == "":
            return end == ""
        closes = self.marks.closes
        return (end != "" and tail.startswith(end)) or (closes is not None and tail.startswith(closes))

    def _tail_ids(self, turn: Turn, tail: str) -> list[int]:
        """Return the ids of the text after an answer, without an end-of-turn token that was sampled already."""
        ids, end_id = self.encode(tail), int(turn.tokens[-1])
        if self.end_of(turn) and end_id in ids:
            count = ids.index(end_id) + 1
            text_before = self.decode(ids[: count - 1])  # a template's mark before a sampled stop text must be kept
            closes = self.marks.closes or ""
            if text_before.strip() == "" and (count == 1 or closes.startswith(self.decode(ids[:count]))):
                return ids[count:]
        return ids

    def _is_fork(
        self, rendered: str, continued: tuple[Turn, str] | None, earlier_prompts: Callable[[], Iterable[str]] | None
    ) -> bool:
        """Return True if a prompt does not continue the newest answer in its conversation.

        `continued`: turn that it continues, and the text after that answer; `earlier_prompts`: as in `prompt`.
        """
        continued_prompt = "" if continued is None else continued[0].rendered or ""
        prompts = {t.rendered for t in self._turns if t.rendered is not None}
        if max(map(len, prompts), default=0) <= len(continued_prompt):
            return False
        if earlier_prompts is not None:
            newest_prompt = next((text for text in earlier_prompts() if text in prompts), None)
            if newest_prompt is not None:  # otherwise only the engine's own server can render these messages
                return newest_prompt != continued_prompt
        asks = self.marks.asks
        for prompt in prompts:
            if len(prompt) <= len(continued_prompt):
                continue
            position = prompt.rfind(asks)
            head = prompt[:position] if position >= 0 else prompt  # `rendered` may have another text after the head
            if rendered.startswith(head) and rendered.rfind(asks) > position:
                return True
        return False


def _past_blank(text: str, position: int) -> int:
    """Return the position after white space and blank reasoning that begin at `position`."""
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _end_of_answer(answer: str, text: str) -> int | None:
    """Return the position in `text` after the answer; None if `text` does not begin with the answer.

    White space and blank reasoning beside marks may differ.
    """
    position = 0
    for part in map(str.strip, _MARK.split(_NO_REASONING.sub("", answer))):
        if part:
            position = _past_blank(text, position)
            if not text.startswith(part, position):
                return None
            position += len(part)
    return position


def _length(turn: Turn) -> int:
    return len(turn.rendered or "")


def _rank(turn: Turn, tail: str) -> tuple[int, bool]:
    """Return a key by which `max` prefers the turn with the shortest `tail`, and of these one that no turn follows."""
    return -len(tail), not turn.is_followed


def _hash(ids: Ids) -> int:
    return hash(ids.tobytes())

