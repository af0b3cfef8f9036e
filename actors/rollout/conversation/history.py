"""What one run was answered: for prompts that go on from it, and for experiences of whole conversations.

Asks nothing of an engine but its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trinity_es.actors.engines.interface import Completion
from trinity_es.actors.rollout.conversation.conversations import Conversing, Message
from trinity_es.actors.rollout.conversation.given_back import fit
from trinity_es.actors.rollout.conversation.turns import Turn, Turns
from trinity_es.events.errors import WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["Remembering", "Usage"]

KeptIds = tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[Message]]


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one `Model` asked of its engine."""

    requests: int = 0
    prompt_tokens: int = 0
    """A prompt of n > 1 answers counts once."""
    response_tokens: int = 0
    min_version: int | None = None
    """Oldest model version that made a token; None before the first request."""
    max_version: int | None = None
    continued: int = 0
    """Requests whose prompt went on from an earlier answer."""
    forks: int = 0
    """Turns whose conversation went on in a new sequence, since the template renders it otherwise."""

    def saw(self, *versions: int) -> None:
        known = [v for v in (self.min_version, self.max_version) if v is not None]
        self.min_version, self.max_version = min([*known, *versions]), max([*known, *versions])


class Remembering(Conversing):
    """Who has a tokenizer, and keeps what a run asked and was answered."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.turns = Turns(self.encode, lambda ids: self.tokenizer.decode(ids), self.marks)
        """What this run read and wrote, turn by turn."""
        self._numbers = 0
        self._tools: list[Any] = []
        """Those that chats of this run were asked with, each once, the newest last."""
        self._history: dict[int, list[tuple[Experience, Turn]]] = {}

    def numbered(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def exact_prompt(self, rendered: str, earlier: Callable[[], Iterable[str]] | None = None) -> list[int] | None:
        found = self.turns.prompt(rendered, earlier)
        self.usage.forks = self.turns.forks
        return found

    def keep(
        self, number: int, found: Sequence[tuple[Completion, Experience]], rendered: str | None = None
    ) -> list[Experience]:
        """Keep the answers to the request of this number; returns their experiences.

        `rendered` is the prompt as the chat template gave it, of a chat.
        """
        before: dict[int, Turn | None] = {}
        for completion, _ in found:
            prompt = completion.prompt_token_ids
            if id(prompt) not in before:  # those of one request share their prompt
                before[id(prompt)] = self.turns.before(prompt)
        self._history[number] = [
            (experience, self.turns.answered(
                rendered, completion.prompt_token_ids, completion.token_ids, experience.logprobs, completion.text,
                dict(experience.info), before[id(completion.prompt_token_ids)], completion.finish_reason == "length",
            ))
            for completion, experience in found
        ]
        if rendered is not None and found:
            tools = found[0][1].tools
            self._tools = [*(known for known in self._tools if known != tools), tools]
        self.usage.continued += any(turn is not None for turn in before.values())
        return [experience for _, experience in found]

    def given_out(self, clear: bool, per_request: bool) -> list[Experience]:
        groups = sorted(self._history.items())
        for number, group in groups:
            for experience, _ in group:
                experience.eid.step = experience.eid.step or number
        answers = [answer for _, group in groups for answer in group]
        if clear:
            self._history = {}
        if per_request:
            return [experience for experience, _ in answers]
        here = {turn for _, turn in answers}
        followed = {turn.before for turn in here if turn.before in here}
        inner = followed - {turn for experience, turn in answers if experience.reward is not None}
        found, free = [], set(inner)
        for experience, turn in answers:
            if turn in inner:
                continue
            learned = {turn, *free.intersection(turn.chain())}
            free -= learned
            found.append(experience if len(learned) == 1 else self._joined(experience, turn, learned))
        return found

    def experiences_of_ids(self, sequences: Sequence[KeptIds]) -> list[Experience]:
        """Return the experiences of sequences that a client of this run put together.

        Each is its ids, where in them (begin, end) answers lie, and the messages that they are. Answers must be those
        of this run, id by id as they were sampled, and are learned from once: what two sequences share is masked in the
        second, and one in which nothing is left is left out. What follows the last answer is cut off. Raises
        WorkflowError for ids that this run did not sample.
        """
        found, given = list[Experience](), set[Turn]()
        for tokens, answers, messages in sequences:
            if not answers:
                continue
            first, last = answers[-1]
            turn = self.turns.ending(tokens[:last], first)
            chain = {(t.begin, len(t.tokens)): t for t in turn.chain()} if turn else {}
            for first, last in answers:
                if (first, last) not in chain:
                    raise WorkflowError(
                        f"a sequence of {len(tokens)} ids has {first} to {last - 1} as an answer, which this run did "
                        "not sample there: what is learned from must be asked for by this run's endpoint"
                    )
            learned = [chain[answer] for answer in answers if chain[answer] not in given]
            if turn is not None and learned:
                given.update(learned)
                experience = self.sampled(turn, None, None, learned)
                experience.messages = list(messages)
                experience.truncate_status = "response_truncated" if turn.cut else None
                found.append(experience)
        return found

    def forget(self) -> None:
        self._history = {}
        self.turns.clear()

    def _joined(self, last: Experience, turn: Turn, learned: Collection[Turn]) -> Experience:
        joined = self.sampled(turn, last.messages, last.tools, learned)
        joined.eid, joined.reward, joined.metrics = last.eid, last.reward, last.metrics
        joined.truncate_status = last.truncate_status
        joined.info = {**{k: v for k, v in last.info.items() if not k.endswith("_spans")}, **joined.info}
        return joined

    def _newest_sampled(self, messages: Sequence[Message], tools: Any) -> tuple[Turn, int, Any] | None:
        """Return the turn that gave the newest answer of a conversation which was sampled in it, its number, its tools.

        Where no tools are named, they are those of this run's chats.
        """
        ways = self._tools[::-1] if tools is None else [tools]
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") != "assistant":
                continue
            for given in ways:
                if turn := self._ends_with(messages[: i + 1], given):
                    return turn, i, given
        return None

    def _asked_in(self, messages: Sequence[Message], tools: Any) -> bool:
        """Return True if some answer of a conversation stands where this run asked for one, or is its word for word."""
        known = {turn.rendered for turn in self.turns} - {None}
        said = {turn.text.strip() for turn in self.turns if turn.rendered is not None} - {""}
        ways = self._tools if tools is None else [tools]
        return any(
            m.get("role") == "assistant" and isinstance(m.get("content"), str) and m["content"].strip() in said
            for m in messages
        ) or (bool(known) and any(text in known for given in ways for text in self.earlier_prompts(messages, given)))

    def _ends_with(self, messages: Sequence[Message], tools: Any) -> Turn | None:
        """Return the turn that gave a conversation's last answer; None where somebody else did."""
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=0)
        if not self.turns or not last or messages[last - 1].get("role") == "assistant":
            return None
        return self.turns.conversation(
            self._text(list(messages[: last + 1]), tools), self._text(list(messages[:last]), tools, answer=True),
            partial(fit, messages[last]),
        )
