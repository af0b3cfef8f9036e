"""The answers of one run, for prompts that continue them and for experiences of whole conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trinity_es.actors.engines.interface import Completion
from trinity_es.actors.rollout.conversation.answer_comparison import fit
from trinity_es.actors.rollout.conversation.conversation_tokens import Conversing, Message
from trinity_es.actors.rollout.conversation.turns import Turn, Turns
from trinity_es.events.errors import WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["Remembering", "Usage"]

KeptIds = tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[Message]]


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counts of one `Model`'s requests to its engine."""

    requests: int = 0
    prompt_tokens: int = 0
    """A prompt with n > 1 answers counts once."""
    response_tokens: int = 0
    min_version: int | None = None
    """Oldest model version that made a token; None before the first request."""
    max_version: int | None = None
    continued: int = 0
    """Requests whose prompt continued an earlier answer."""
    forks: int = 0
    """Prompts that began a new sequence, since the template renders earlier answers differently."""

    def saw(self, *versions: int) -> None:
        earlier = [v for v in (self.min_version, self.max_version) if v is not None]
        self.min_version, self.max_version = min([*earlier, *versions]), max([*earlier, *versions])


class Remembering(Conversing):
    """Base of models that keep the prompts and answers of a run."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.turns = Turns(self.encode, lambda ids: self.tokenizer.decode(ids), self.marks)
        self._numbers = 0
        self._tools: list[Any] = []
        self._history: dict[int, list[tuple[Experience, Turn]]] = {}

    def numbered(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def exact_prompt(self, rendered: str, earlier: Callable[[], Iterable[str]] | None = None) -> list[int] | None:
        ids = self.turns.prompt(rendered, earlier)
        self.usage.forks = self.turns.forks
        return ids

    def keep(
        self, number: int, answers: Sequence[tuple[Completion, Experience]], rendered: str | None = None
    ) -> list[Experience]:
        """Keep the answers to request `number`; returns their experiences. `rendered`: a chat's prompt as text."""
        before: dict[int, Turn | None] = {}
        for completion, _ in answers:
            prompt = completion.prompt_token_ids
            if id(prompt) not in before:  # answers to one request share their prompt
                before[id(prompt)] = self.turns.before(prompt)
        self._history[number] = [
            (experience, self.turns.answered(
                rendered, completion.prompt_token_ids, completion.token_ids, experience.logprobs, completion.text,
                dict(experience.info), before[id(completion.prompt_token_ids)], completion.finish_reason == "length",
            ))
            for completion, experience in answers
        ]
        if rendered is not None and answers:
            tools = answers[0][1].tools
            self._tools = [*(other for other in self._tools if other != tools), tools]
        self.usage.continued += any(turn is not None for turn in before.values())
        return [experience for _, experience in answers]

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
        turns = {turn for _, turn in answers}
        followed = {turn.before for turn in turns if turn.before in turns}
        inner = followed - {turn for experience, turn in answers if experience.reward is not None}
        experiences, free = [], set(inner)
        for experience, turn in answers:
            if turn in inner:
                continue
            learned = {turn, *free.intersection(turn.chain())}
            free -= learned
            experiences.append(experience if len(learned) == 1 else self._joined(experience, turn, learned))
        return experiences

    def experiences_of_ids(self, sequences: Sequence[KeptIds]) -> list[Experience]:
        """Return the experiences of sequences that a client of this run put together.

        A sequence is its ids, the (begin, end) of its answers in them, and its messages. The answers must have the
        exact ids that this run sampled, else WorkflowError is raised. Each is trained on once: an answer that two
        sequences share is masked in the second, and a sequence without further answers is dropped. Ids after the last
        answer are cut off.
        """
        experiences, used = list[Experience](), set[Turn]()
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
                        "not sample there: sample all answers to train on through this run's endpoint"
                    )
            learned = [chain[answer] for answer in answers if chain[answer] not in used]
            if turn is not None and learned:
                used.update(learned)
                experience = self.sampled(turn, None, None, learned)
                experience.messages = list(messages)
                experience.truncate_status = "response_truncated" if turn.cut else None
                experiences.append(experience)
        return experiences

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
        """Return the turn, index and tools of a conversation's newest sampled answer; None tools: try the run's."""
        candidates = self._tools[::-1] if tools is None else [tools]
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") != "assistant":
                continue
            for candidate in candidates:
                if turn := self._last_turn(messages[: i + 1], candidate):
                    return turn, i, candidate
        return None

    def _answered_in(self, messages: Sequence[Message], tools: Any) -> bool:
        prompts = {turn.rendered for turn in self.turns} - {None}
        texts = {turn.text.strip() for turn in self.turns if turn.rendered is not None} - {""}
        candidates = self._tools if tools is None else [tools]
        return any(
            m.get("role") == "assistant" and isinstance(m.get("content"), str) and m["content"].strip() in texts
            for m in messages
        ) or (bool(prompts) and any(text in prompts for t in candidates for text in self.earlier_prompts(messages, t)))

    def _last_turn(self, messages: Sequence[Message], tools: Any) -> Turn | None:
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=0)
        if not self.turns or not last or messages[last - 1].get("role") == "assistant":
            return None
        return self.turns.conversation(
            self._text(list(messages[: last + 1]), tools), self._text(list(messages[:last]), tools, answer=True),
            partial(fit, messages[last]),
        )
