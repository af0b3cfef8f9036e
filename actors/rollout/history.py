"""What one run was answered: for prompts that go on from it, and for experiences of whole conversations.

Asks nothing of an engine but its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from trinity_es.actors.engines.interface import Completion
from trinity_es.actors.rollout.conversations import Conversing, Message
from trinity_es.actors.rollout.given_back import fit
from trinity_es.actors.rollout.turns import Turn, Turns
from trinity_es.actors.rollout.usage import Usage
from trinity_es.events.experience import Experience

__all__ = ["Remembering"]


class Remembering(Conversing):
    """Who has a tokenizer, and keeps what a run asked and was answered."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.turns = Turns(self.encode, lambda ids: self.tokenizer.decode(ids), self.marks)
        """What this run read and wrote, turn by turn."""
        self._numbers = 0
        self._history: dict[int, list[tuple[Experience, Turn]]] = {}

    def numbered(self) -> int:
        """Return the number of this run's next request."""
        self._numbers += 1
        return self._numbers - 1

    def exact_prompt(self, rendered: str, earlier: Callable[[], Iterable[str]] | None = None) -> list[int] | None:
        """Return the ids of a chat's prompt where it goes on from answers of this run: see `Turns.prompt`."""
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
        self.usage.continued += any(turn is not None for turn in before.values())
        return [experience for _, experience in found]

    def given_out(self, clear: bool, per_request: bool) -> list[Experience]:
        """Return what was kept: see `Model.extract_experience_from_history`."""
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

    def forget(self) -> None:
        """Keep nothing of the run any more."""
        self._history = {}
        self.turns.clear()

    def _joined(self, last: Experience, turn: Turn, learned: Collection[Turn]) -> Experience:
        """Return the experience of a conversation in place of that of its last answer."""
        joined = self.sampled(turn, last.messages, last.tools, learned)
        joined.eid, joined.reward, joined.metrics = last.eid, last.reward, last.metrics
        joined.truncate_status = last.truncate_status
        joined.info = {**{k: v for k, v in last.info.items() if not k.endswith("_spans")}, **joined.info}
        return joined

    def _newest_sampled(self, messages: Sequence[Message], tools: Any) -> tuple[Turn, int] | None:
        """Return the turn that gave the newest answer of a conversation which was sampled in it, and its number."""
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") == "assistant" and (turn := self._ends_with(messages[: i + 1], tools)):
                return turn, i
        return None

    def _asked_in(self, messages: Sequence[Message], tools: Any) -> bool:
        """Return True if some answer of a conversation stands where this run asked for one."""
        known = {turn.rendered for turn in self.turns}
        return bool(known) and any(text in known for text in self.earlier_prompts(messages, tools))

    def _ends_with(self, messages: Sequence[Message], tools: Any) -> Turn | None:
        """Return the turn that gave a conversation's last answer; None where somebody else did."""
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=0)
        if not self.turns or not last or messages[last - 1].get("role") == "assistant":
            return None
        return self.turns.conversation(
            self._text(list(messages[: last + 1]), tools), self._text(list(messages[:last]), tools, answer=True),
            partial(fit, messages[last]),
        )
