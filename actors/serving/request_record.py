"""Tokens that an engine generated for one HTTP request: exact ids, logprobs and version spans, as experiences.

A request may ask the engine several times (a list of prompts, a loop over tools). Whatever its API, it is recorded
where the engine is called: the server sets `REQUEST` for each request, and the caller of the engine (vLLM's own server
by `engines/vllm/server.py`, or `small_api.py`) reports there.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_es.actors.engines.interface import Generation, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.run_journal import JournaledCall
from trinity_es.actors.serving.errors import ApiError
from trinity_es.actors.serving.small_api_requests import messages_of, template_of, tools_of
from trinity_es.events.errors import EngineError, WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["REQUEST", "RequestRecord"]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Record of one request, a `Recording` of engines/interface.py. `model` is the run's, `body` the client's."""

    model: Model
    body: Mapping[str, Any]
    failed_with: Callable[[EngineError], None]
    keeps_answers: bool
    """True if the model keeps the answers as experiences."""
    wanted: bool = True
    chat: bool
    """True if the chat template makes its prompt from messages."""
    longest: int | None = None
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    number: int = 0
    """Number of the request in its run."""
    rendered: str | None = None
    """The prompt as the chat template returned it."""
    generations: list[Generation] = field(default_factory=list)
    failed: EngineError | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampling that applies if the client says nothing."""
        return Sampling(adapter=self.adapter, max_tokens=self.longest or Sampling().max_tokens)

    @property
    def text(self) -> str | None:
        prompt = self.body.get("prompt")
        return prompt if isinstance(prompt, str) else None

    def exact_prompt(self, rendered: Callable[[], str], ids: list[int]) -> list[int]:
        """Return the token ids to send: those of earlier answers as they were sampled, the others from `ids`."""
        if not (self.chat and self.keeps_answers):
            return ids
        text = rendered()
        if self.model.encode(text) != ids:  # a text that does not encode to these ids again says nothing about them
            return ids
        return self.exact(text) or ids

    def exact(self, text: str) -> list[int] | None:
        """Return a rendered prompt's ids with those sampled for earlier answers; None if it continues no answer."""
        if not (self.chat and self.keeps_answers):
            return None
        self.rendered = text
        return self.model.exact_prompt(text, self._earlier_prompts if "messages" in self.body else None)

    def _earlier_prompts(self) -> Iterator[str]:
        """Yield the prompts that the messages had before each answer in them, newest first."""
        with contextlib.suppress(ApiError, WorkflowError):  # messages that only the engine's own server understands
            messages = messages_of(self.body["messages"])
            yield from self.model.earlier_prompts(messages, tools_of(self.body), template_of(self.body))

    def begin(self, sampling: Sampling, further: dict[str, Any], text: str | None = None) -> Generation:
        """Record a call of the engine; the caller sets the `completions` of the returned object."""
        before = self.model.engine.model_version
        generation = Generation(text=text, sampling=sampling, further=further, before=before)
        self.generations.append(generation)
        return generation

    def journaled(
        self, ids: list[int], sampling: Sampling, further: Mapping[str, Any], forbids: str
    ) -> JournaledCall | None:
        """Begin a call in the run's journal, which keeps its tokens as they come; None if the run has no journal."""
        model = self.model
        if model.journal is None:
            return None
        return model.journal.call(model.engine, model.name, ids, sampling, further, forbids)

    def fail(self, error: EngineError) -> None:
        """Note that the engine failed, and report it with `failed_with`."""
        if self.failed is None:  # the first error is the one to report
            self.failed = error
            self.failed_with(error)

    def complete(self) -> bool:
        """Return True if every call of the engine so far is answered."""
        return bool(self.generations) and all(g.completions is not None for g in self.generations)

    def experiences(self) -> list[Experience]:
        """Return an experience for each answer, in the order of the prompts; add them to the history of a run.

        Raises EngineError for an answer that was cut off.
        """
        answers = []
        messages = self.body.get("messages") if self.chat else None
        for call in self.generations:
            for completion, experience in self.model.with_experiences(
                call.completions or [], call.before, call.text, call.sampling
            ):
                experience.info["model_version"] = call.before
                if call.further:
                    experience.info["further_sampling"] = call.further
                experience.eid.step = self.number
                if isinstance(messages, list):
                    experience.messages = [*messages, {"role": "assistant", "content": completion.text}]
                    experience.tools = self.body.get("tools")
                answers.append((completion, experience))
        if self.keeps_answers:
            self.model.keep(self.number, answers, self.rendered if len(self.generations) == 1 else None)
        return [experience for _, experience in answers]


REQUEST: contextvars.ContextVar[RequestRecord | None] = contextvars.ContextVar("request", default=None)
"""The request for which the engine is called now."""
