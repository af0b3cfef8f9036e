"""The turns of one run as the token ids that the model read and wrote: prompts go on from them, never from their text.

What was sampled is not made again from its text: another tokenization of the same text is not what the model wrote. So
a turn keeps its prompt as the chat template rendered it, and its ids. Where the text of a later prompt goes on from a
turn, its ids are those of the turn and of the text that follows, other white space beside its marks aside; where the
template renders the turn otherwise once others follow (it drops the reasoning, writes a tool call in its own form), a
new sequence begins: a fork. Pure: texts and ids, no messages, no engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity_es.actors.rollout.conversation.given_back import Fit

__all__ = ["Marks", "Turn", "Turns"]

Ids = np.ndarray[Any, np.dtype[np.int32]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]

_MARK = re.compile(r"(</?[^<>\s]+>|\[/?[A-Z_]+\])")
"""What a model writes around the parts of an answer: `<tool_call>`, `</think>`, `[TOOL_CALLS]`."""
_NO_REASONING = re.compile(r"<think>\s*</think>")
_BLANK = re.compile(rf"(?:\s|{_NO_REASONING.pattern})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a chat template writes around an answer."""

    asks: str = ""
    """Opens an answer that is to come: the generation prompt."""
    opens: str = ""
    """White space that stands before an answer once it is given."""
    closes: str | None = None
    """Follows an answer that others follow; None where nobody knows."""
    ends: str | None = None
    """Follows an answer that is the last message; None where nobody knows."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model, and what it had read."""

    rendered: str | None
    """The prompt as the chat template gave it; None where it is no chat's."""
    text: str
    """The answer as its client got it, which may leave out special tokens."""
    tokens: Ids
    """The prompt's ids and the sampled ones."""
    begin: int
    """Where the sampled ones begin."""
    logprobs: Numbers | None
    """Of the sampled ones."""
    info: Mapping[str, Any]
    """What its experience says of it: `version_spans` and `adapter_spans` over the sampled ones, `sampling`."""
    before: Turn | None
    """The turn whose tokens the prompt begins with."""
    cut: bool = False
    """It was cut off, by its longest length or for want of room."""
    followed: bool = False
    """Another turn goes on from it."""
    given: bool = False
    """A conversation that ends with it was given out as an experience."""
    decoded: tuple[str, str] | None = None
    """The text of the sampled ones with special tokens and that of all but the last one, once somebody asked."""

    def chain(self) -> list[Turn]:
        found, turn = [self], self.before
        while turn is not None:
            found.append(turn)
            turn = turn.before
        return found[::-1]


class Turns:
    """The turns of one run, and how often its conversations forked.

    `encode` gives the ids of a text in which special tokens are written out, and adds none; `decode` is the way back.
    `marks` is asked once, when a prompt may go on from a turn.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str], marks: Callable[[], Marks]
    ) -> None:
        self.encode, self.decode, self._probe = encode, decode, marks
        self._marks: Marks | None = None
        self._turns: list[Turn] = []
        self._by_length: dict[int, dict[int, list[Turn]]] = {}
        """By the number of tokens, and a hash of them: thousands of turns have few lengths."""
        self._forked: set[str] = set()

    @property
    def marks(self) -> Marks:
        self._marks = self._probe() if self._marks is None else self._marks
        return self._marks

    @property
    def forks(self) -> int:
        """Prompts that went on from an answer which the template had rendered otherwise, or somebody had changed."""
        return len(self._forked)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def clear(self) -> None:
        self._turns, self._by_length = [], {}

    def prompt(self, rendered: str, earlier: Callable[[], Iterable[str]] | None = None) -> list[int] | None:
        """Return the ids of a chat's prompt where it goes on from a turn; None where it is a first one, or a fork.

        `rendered` is the prompt as the chat template gave it. `earlier` gives the prompts that its messages had before
        each answer in them, newest first, where somebody knows: it tells a fork from another conversation. Else a fork
        is what begins as an earlier prompt and opens a further answer.
        """
        if not self._turns:
            return None
        found = self._continued(rendered)
        if self._forks(rendered, found, earlier):
            self._forked.add(rendered)
        if found is None:
            return None
        turn, tail = found
        return [*turn.tokens.tolist(), *self._following(turn, tail)]

    def before(self, prompt: Sequence[int]) -> Turn | None:
        """Return the longest turn whose very tokens a prompt begins with; of equal ones the last that none follows."""
        ids = np.asarray(prompt, dtype=np.int32)
        for length in sorted((n for n in self._by_length if n <= len(ids)), reverse=True):
            turns = self._by_length[length].get(_hash(ids[:length]), ())
            if same := [t for t in turns if np.array_equal(t.tokens, ids[:length])]:
                return next((t for t in reversed(same) if not t.followed), same[-1])
        return None

    def ending(self, tokens: Sequence[int], begin: int) -> Turn | None:
        """Return the turn of these very tokens, of which those from `begin` on were sampled; None: there is none."""
        ids = np.asarray(tokens, dtype=np.int32)
        turns = self._by_length.get(len(ids), {}).get(_hash(ids), ())
        return next((t for t in reversed(turns) if t.begin == begin and np.array_equal(t.tokens, ids)), None)

    def answered(
        self, rendered: str | None, prompt: Sequence[int], sampled: Sequence[int], logprobs: Numbers | None, text: str,
        info: Mapping[str, Any] | None = None, before: Turn | None = None, cut: bool = False,
    ) -> Turn:
        """Take note of an answer; return its turn.

        `prompt` are the ids that were read, as `prompt` gave them where the conversation went on; `text` is the answer
        as the client got it; `info` what its experience says of it; `before` as the method of that name gives it.
        """
        ids = np.array([*prompt, *sampled], dtype=np.int32)
        if before is not None:
            before.followed = True
        turn = Turn(
            rendered=rendered, text=text, tokens=ids, begin=len(prompt), logprobs=logprobs, info=info or {},
            before=before, cut=cut,
        )
        self._turns.append(turn)
        self._by_length.setdefault(len(ids), {}).setdefault(_hash(ids), []).append(turn)
        return turn

    def conversation(self, rendered: str, prompt: str, fits: Callable[[Collection[str]], Fit]) -> Turn | None:
        """Return the turn that a whole conversation ends with.

        None where its last answer was not sampled here, or where several answers are left that the client may have
        shortened to it: nobody knows which. Of those with the same text, one that no experience was made of.

        `rendered` is the conversation up to its last answer, `prompt` what its messages before that have as a prompt,
        `fits` how well that answer fits one that has these texts, without special tokens and with them.
        """
        found = [(fits(self._texts(turn)), turn) for turn in self._turns if turn.rendered == prompt]
        best = max((how for how, _ in found), default=Fit.NONE)
        if best is Fit.NONE:
            goes_on = self._continued(rendered)
            return goes_on[0] if goes_on is not None and goes_on[1] == self.marks.ends else None
        same = [turn for how, turn in found if how is best]
        if best is Fit.PART and len({turn.text.strip() for turn in same}) > 1:
            return None
        return next((turn for turn in same if not turn.given), same[-1])

    def end_of(self, turn: Turn) -> str:
        """Return the text of the token that ended an answer, which its own text lacks; empty where it was cut off."""
        whole, before = self._decoded(turn)
        last = whole.removeprefix(before) if whole.startswith(before) else "\ufffd"
        # A part of a character is no end, though an engine may have held it back.
        return "" if "\ufffd" in last or turn.text.endswith(last) else last

    def _decoded(self, turn: Turn) -> tuple[str, str]:
        if turn.decoded is None:
            sampled = turn.tokens[turn.begin :].tolist()
            turn.decoded = self.decode(sampled), self.decode(sampled[:-1])
        return turn.decoded

    # --- how a rendered text goes on ----------------------------------------------------------------------------------
    def _continued(self, rendered: str) -> tuple[Turn, str] | None:
        """Return the turn that this text goes on from farthest, and what follows its answer."""
        fits = [t for t in self._turns if t.rendered is not None and rendered.startswith(t.rendered)]
        for length, equal in itertools.groupby(sorted(fits, key=_length, reverse=True), key=_length):
            turns, rest = list(equal), rendered[length:]
            for tail_of in (self._tail, self._loose_tail):
                tails = [(turn, tail) for turn in turns if (tail := tail_of(turn, rest)) is not None]
                if tails:
                    return max(tails, key=lambda found: _rank(*found))
        return None

    def _tail(self, turn: Turn, rest: str) -> str | None:
        """Return what follows a turn's answer in the text behind its prompt; None where that is not this answer.

        White space around the answer may be missing there, as templates strip it.
        """
        if rest == "":
            return None  # the same prompt again
        last = self.end_of(turn)
        for said in self._texts(turn):
            core = said.strip()
            lead, trail = said[: len(said) - len(said.lstrip())], said[len(said.rstrip()) :] if core else ""
            for opening in dict.fromkeys((lead, "", self.marks.opens)):
                if not rest.startswith(opening + core):
                    continue
                after = rest[len(opening) + len(core) :]
                for tail in dict.fromkeys((after.removeprefix(trail), after)):
                    if self._ends_there(tail, last):
                        return tail
        return None

    def _loose_tail(self, turn: Turn, rest: str) -> str | None:
        """Return the same, of an answer that lacks or has other white space beside its marks, too.

        Clients cut the text before a tool call, drop it where it is blank, and give blank reasoning back where there
        was none; templates write white space of their own between the parts of an answer.
        """
        last = self.end_of(turn)
        for said in self._texts(turn) if rest else ():
            at = _end_of_answer(said, rest)
            if at is not None:
                for tail in (rest[at:], rest[_past_blank(rest, at) :]):
                    if self._ends_there(tail, last):
                        return tail
        return None

    def _texts(self, turn: Turn) -> Collection[str]:
        """Return the texts that an answer may be given back as: without special tokens, and with them but its end."""
        whole = self._decoded(turn)[0].removesuffix(self.end_of(turn))
        return dict.fromkeys((turn.text, whole)).keys()

    def _ends_there(self, tail: str, last: str) -> bool:
        """Return True if an answer ends before this text; else somebody wrote more into it."""
        closes = self.marks.closes
        return (
            (tail == "" and not last) or (last != "" and tail.startswith(last))
            or (tail != "" and closes is not None and tail.startswith(closes))
        )

    def _following(self, turn: Turn, tail: str) -> list[int]:
        """Return the ids of the text that follows an answer.

        An end of the turn that was sampled and is written by the template, too, is there once.
        """
        ids, last = self.encode(tail), int(turn.tokens[-1])
        if self.end_of(turn) and last in ids:
            until = ids.index(last) + 1
            before = self.decode(ids[: until - 1])  # no mark of the template is left out for a stop text behind it
            if before.strip() == "" and (until == 1 or (self.marks.closes or "").startswith(self.decode(ids[:until]))):
                return ids[until:]
        return ids

    def _forks(
        self, rendered: str, found: tuple[Turn, str] | None, earlier: Callable[[], Iterable[str]] | None
    ) -> bool:
        """Return True if the newest answer in a conversation is not what its prompt goes on from."""
        since = "" if found is None else found[0].rendered or ""
        known = {t.rendered for t in self._turns if t.rendered is not None}
        if max(map(len, known), default=0) <= len(since):
            return False  # there is no newer one
        if earlier is not None:
            newest = next((text for text in earlier() if text in known), None)
            if newest is not None:  # else its messages are in a form that only the engine's own server reads
                return newest != since
        asks = self.marks.asks
        heads = ((text, text.rfind(asks)) for text in known if len(text) > len(since))
        return any(
            rendered.startswith(text[:at] if at >= 0 else text) and rendered.rfind(asks) > at for text, at in heads
        )


def _past_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _end_of_answer(said: str, rest: str) -> int | None:
    """Return where an answer ends at the begin of a text, white space beside marks aside; None where it is not there.
    """
    at = 0
    for part in _MARK.split(_NO_REASONING.sub("", said)):  # texts and marks in turn
        if part := part.strip():
            at = _past_blank(rest, at)
            if not rest.startswith(part, at):
                return None
            at += len(part)
    return at


def _length(turn: Turn) -> int:
    return len(turn.rendered or "")


def _rank(turn: Turn, tail: str) -> tuple[int, bool]:
    """Return how far a text goes on from a turn; of equal ones that which none follows."""
    return -len(tail), not turn.followed


def _hash(ids: Ids) -> int:
    return hash(ids.tobytes())

