"""History of the answers of one run, from which prompts are continued and conversations become experiences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import Completion
from trinity_es.actors.engines.long_text_tokenization import decoded_prompt, has_byte_decoder
from trinity_es.actors.rollout.conversation.answer_comparison import fit
from trinity_es.actors.rollout.conversation.conversation_tokens import Conversing, Message
from trinity_es.actors.rollout.conversation.turns import Ids, Turn, Turns
from trinity_es.events.errors import WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["Remembering", "Usage"]

KeptIds = tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[Message]]


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counts of one `Model`'s requests to its engine."""

    requests: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts; a prompt with n > 1 answers counts once."""
    response_tokens: int = 0
    min_version: int | None = None
    """Oldest model version that generated a token; None before the first request."""
    max_version: int | None = None
    continued: int = 0
    """Number of requests whose prompt continued an earlier answer."""
    forks: int = 0
    """Number of prompts that began a new sequence because earlier answers in them were rendered differently."""

    def add_versions(self, *versions: int) -> None:
        all_versions = [*(v for v in (self.min_version, self.max_version) if v is not None), *versions]
        self.min_version, self.max_version = min(all_versions), max(all_versions)


class Remembering(Conversing):
    """Base of models that keep the prompts and answers of one run."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.turns = Turns(self.encode, self.decode, self.marks)
        self._request_count = 0
        self._tools: list[Any] = []
        """Distinct values of `tools` in this run's chats, the most recently used last."""
        self._history: dict[int, list[tuple[Experience, Turn]]] = {}
        """Answers to each request, by the request's number, until they are extracted."""

    def next_number(self) -> int:
        self._request_count += 1
        return self._request_count - 1

    def exact_prompt(
        self, rendered: str, earlier_prompts: Callable[[], Iterable[str]] | None = None
    ) -> list[int] | None:
        """Return the token ids of a chat's prompt if it continues an answer of this run, else None (`Turns.prompt`)."""
        ids = self.turns.prompt(rendered, earlier_prompts)
        self.usage.forks = self.turns.forks
        return ids

    def keep(
        self, number: int, answers: Sequence[tuple[Completion, Experience]], rendered: str | None = None
    ) -> list[Experience]:
        """Keep the answers to request `number`, and return their experiences. `rendered`: text of a chat's prompt."""
        previous_turns: dict[int, Turn | None] = {}  # by `id` of the prompt, which answers to one request share
        for completion, experience in answers:  # found before any is recorded, so that all follow the same turn
            assert experience.tokens is not None
            if id(completion.prompt_token_ids) not in previous_turns:
                prompt = experience.tokens[: experience.prompt_length]
                previous_turns[id(completion.prompt_token_ids)] = self.turns.turn_before(prompt)
        turns = []
        for completion, experience in answers:
            prompt, sampled = np.split(experience.tokens, [experience.prompt_length])
            turns.append((experience, self.turns.record(
                rendered, prompt, sampled, experience.logprobs, completion.text, dict(experience.info),
                previous_turns[id(completion.prompt_token_ids)], is_cut=completion.finish_reason == "length",
                prompt_text=experience.prompt_text,
            )))
        self._history[number] = turns
        if rendered is not None and answers:
            tools = answers[0][1].tools
            self._tools = [*(other for other in self._tools if other != tools), tools]
        self.usage.continued += any(turn is not None for turn in previous_turns.values())
        return [experience for _, experience in answers]

    def prompt_text(self, prompt: Ids) -> str:
        """Return the text of a prompt. Decode only what follows this run's last answer in it, if that is exact."""
        tokenizer: Any = self.tokenizer
        is_local = has_byte_decoder(tokenizer) and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        turn = self.turns.turn_before(prompt) if is_local else None
        known_text = None if turn is None else self.turns.text_through(turn)
        if turn is None or known_text is None:
            return decoded_prompt(tokenizer, prompt)
        return known_text + self.decode(prompt[len(turn.tokens) :])

    def extracted(self, clear: bool, per_request: bool) -> list[Experience]:
        """Return the answers so far as experiences, as `Model.extract_experience_from_history` says."""
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
        followed_turns = {turn.previous for turn in turns if turn.previous in turns}
        # Turns that are trained on in a later turn's experience; an answer with its own reward stays separate.
        inner_turns = followed_turns - {turn for experience, turn in answers if experience.reward is not None}
        experiences, unlearned_turns = [], set(inner_turns)
        for experience, turn in answers:
            if turn in inner_turns:
                continue
            learned = {turn, *unlearned_turns.intersection(turn.chain())}
            unlearned_turns -= learned
            experiences.append(experience if len(learned) == 1 else self._joined_experience(experience, turn, learned))
        return experiences

    def experiences_of_ids(self, sequences: Sequence[KeptIds]) -> list[Experience]:
        """Return experiences of token sequences that a client of this run assembled.

        A sequence is its ids, the (begin, end) of its answers in them, and its messages. Raises WorkflowError if an
        answer does not have the exact ids that this run sampled. Each answer is trained on once: if two sequences share
        it, it is masked in the second, and a sequence without other answers is dropped. Ids after the last answer are
        cut off.
        """
        experiences, learned_turns = list[Experience](), set[Turn]()
        for tokens, answers, messages in sequences:
            if not answers:
                continue
            begin, end = answers[-1]
            turn = self.turns.turn_of(tokens[:end], begin)
            turn_at = {(t.begin, len(t.tokens)): t for t in turn.chain()} if turn else {}
            for begin, end in answers:
                if (begin, end) not in turn_at:
                    raise WorkflowError(
                        f"ids {begin} to {end - 1} in a sequence of {len(tokens)} are marked as an answer that this "
                        "run did not sample: sample all answers to train on through this run's endpoint"
                    )
            learned = [turn_at[answer] for answer in answers if turn_at[answer] not in learned_turns]
            if turn is not None and learned:
                learned_turns.update(learned)
                experience = self.sampled(turn, None, None, learned)
                experience.messages = list(messages)
                experience.truncate_status = "response_truncated" if turn.is_cut else None
                experiences.append(experience)
        return experiences

    def forget(self) -> None:
        self._history = {}
        self.turns.clear()

    def _joined_experience(self, last: Experience, turn: Turn, learned: Collection[Turn]) -> Experience:
        """Return one experience of the sequence up to `turn`. Reward, ids and the like are from `last`, its answer."""
        joined = self.sampled(turn, last.messages, last.tools, learned)
        joined.eid, joined.reward, joined.metrics = last.eid, last.reward, last.metrics
        joined.truncate_status = last.truncate_status
        joined.info = {**{k: v for k, v in last.info.items() if not k.endswith("_spans")}, **joined.info}
        return joined

    def _newest_sampled_answer(self, messages: Sequence[Message], tools: Any) -> tuple[Turn, int, Any] | None:
        """Return turn, index and tools of a conversation's newest sampled answer. If `tools` is None, try the run's."""
        candidates = self._tools[::-1] if tools is None else [tools]
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") != "assistant":
                continue
            for candidate in candidates:
                if turn := self._last_turn(messages[: i + 1], candidate):
                    return turn, i, candidate
        return None

    def _has_answer_in(self, messages: Sequence[Message], tools: Any) -> bool:
        """Return True if the text or the prompt of some answer of this run is in a conversation."""
        prompts = {turn.rendered for turn in self.turns} - {None}
        texts = {turn.text.strip() for turn in self.turns if turn.rendered is not None} - {""}
        for message in messages:
            content = message.get("content")
            if message.get("role") == "assistant" and isinstance(content, str) and content.strip() in texts:
                return True
        candidates = self._tools if tools is None else [tools]
        return bool(prompts) and any(p in prompts for t in candidates for p in self.earlier_prompts(messages, t))

    def _last_turn(self, messages: Sequence[Message], tools: Any) -> Turn | None:
        """Return the turn of the last answer in a conversation; None if this run did not sample it."""
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=0)
        if not self.turns or not last or messages[last - 1].get("role") == "assistant":
            return None
        return self.turns.last_turn(
            self._text(list(messages[: last + 1]), tools), self._text(list(messages[:last]), tools, begin_answer=True),
            partial(fit, messages[last]),
        )
