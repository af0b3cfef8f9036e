"""The turns of one run as the token ids that the model read and wrote, for prompts and experiences of conversations.

What was sampled is never made again from its text: another tokenization of the same text is not what the model wrote.
So the prompt of a further turn begins with the ids of the turns before it, and a whole conversation is one sequence
with the logprobs that its tokens were sampled with. Where a chat template renders earlier turns otherwise once others
follow (it drops their reasoning, say), the conversation goes on in a new sequence: a fork. Pure; knows no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Turn", "Turns"]

Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Turn:
    """A conversation up to one answer of the model."""

    tokens: list[int]
    """All that the model had read and written when it had given this answer."""
    sampled: list[bool]
    """Which of the tokens it wrote."""
    logprobs: list[float] | None
    """Of each token the logprob that it was sampled with, 0 where it was not; None where an answer came without."""
    spans: list[list[int]] | None
    """`[model_version, start, end]` over all tokens, of what was sampled; None where nobody knows."""
    messages: list[Message]
    """The conversation, this answer included."""
    answers: list[int]
    """Numbers of the messages that were sampled in this sequence."""
    _texts: tuple[str, ...] = field(default=(), repr=False)

    def texts(self, decode: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
        """Return the texts by which a rendered conversation may go on from here.

        That of its tokens, and that of what was read with the answer as messages have it, which leaves out special
        tokens; then with the token that ended the turn, which the template writes, too.
        """
        if not self._texts:
            start = len(self.sampled) - self.sampled[::-1].index(False) if False in self.sampled else 0
            plain = decode(self.tokens[:start]) + str(self.messages[-1].get("content", ""))
            self._texts = (decode(self.tokens), plain + decode(self.tokens[-1:]), plain)
        return self._texts


class Turns:
    """The turns of one run, and how often its conversations forked."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Begin with none. `decode` gives the text of token ids, special tokens included."""
        self.decode, self.forks = decode, 0
        self._turns: list[Turn] = []

    def prompt(self, rendered: list[int], messages: Sequence[Message]) -> tuple[list[int], Turn | None]:
        """Return the prompt of a chat, and the turn that it goes on from.

        `rendered` are the messages by the chat template. Where it begins with the text of an earlier turn, it begins
        with the ids of that turn instead. Counts a fork where the messages go on from an earlier turn and the text does
        not.
        """
        before = self._longest(rendered) if self._turns else None
        if before is not None:
            turn, end = before
            return [*turn.tokens, *rendered[end:]], turn
        self.forks += any(messages[: len(t.messages)] == t.messages for t in self._turns)
        return rendered, None

    def answered(
        self, prompt: list[int], before: Turn | None, answer: Sequence[int], logprobs: Sequence[float] | None,
        spans: Sequence[Sequence[int]], messages: Sequence[Message],
    ) -> None:
        """Take note of an answer to a prompt as `prompt` gave it. `spans` are over the answer's tokens; empty: nobody
        knows. `messages` are the conversation with the answer.
        """
        read = len(prompt) - (0 if before is None else len(before.tokens))
        none = Turn(tokens=[], sampled=[], logprobs=[], spans=[], messages=[], answers=[])
        earlier = none if before is None else before
        known = logprobs is not None and earlier.logprobs is not None
        versions = bool(spans) and earlier.spans is not None
        self._turns.append(Turn(
            tokens=[*prompt, *answer],
            sampled=[*earlier.sampled, *[False] * read, *[True] * len(answer)],
            logprobs=[*(earlier.logprobs or ()), *[0.0] * read, *(logprobs or ())] if known else None,
            spans=[*(earlier.spans or ()), *([v, a + len(prompt), b + len(prompt)] for v, a, b in spans)]
            if versions else None,
            messages=list(messages), answers=[*earlier.answers, len(messages) - 1],
        ))

    def whole(self, render: Callable[[], list[int]], messages: Sequence[Message]) -> Turn | None:
        """Return the turn that is this conversation; None where its last answer was not sampled here.

        `render` gives all of the messages by the chat template. What follows the last answer is left out.
        """
        found = self._longest(render()) if self._turns else None
        if found is None or any(m.get("role") == "assistant" for m in messages[len(found[0].messages):]):
            return None
        return found[0]

    def _longest(self, rendered: list[int]) -> tuple[Turn, int] | None:
        """Return the longest turn with whose text this begins, and how many of these tokens that text takes."""
        text = self.decode(rendered)
        fits = [(t, said) for t in self._turns for said in t.texts(self.decode) if text.startswith(said)]
        for turn, said in sorted(fits, key=lambda fit: len(fit[1]), reverse=True):
            end = bisect_left(range(len(rendered)), len(said), key=lambda n: len(self.decode(rendered[:n])))
            if self.decode(rendered[:end]) == said:  # else it ends within a token
                return turn, end
        return None
