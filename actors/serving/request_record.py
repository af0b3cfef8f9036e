"""Record of the tokens generated for one HTTP request: exact ids, logprobs and version spans, as experiences.

A request may call the engine several times (a list of prompts, a loop over tools). Whatever its API, it is recorded
where the engine is called. The server sets `REQUEST` for each request, and the caller of the engine (vLLM's own server
by `engines/vllm/server.py`, or `small_api.py`) reports to it.
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
from trinity_es.actors.serving.small_api_requests import parse_messages, parse_tools, template_variables
from trinity_es.events.errors import EngineError, WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["REQUEST", "RequestRecord"]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Record of one request (implements `Recording`). `model`: the run's model; `body`: JSON that the client sent."""

    model: Model
    body: Mapping[str, Any]
    failed_with: Callable[[EngineError], None]
    keeps_answers: bool
    """True if the model keeps the answers as experiences."""
    records_tokens: bool = True
    chat: bool
    """True if the prompt is rendered from messages by the chat template."""
    default_length: int | None = None
    engine_only: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    number: int = 0
    """Number of the request in its run."""
    rendered: str | None = None
    """Text of the prompt as the chat template rendered it."""
    generations: list[Generation] = field(default_factory=list)
    failed: EngineError | None = None

    @property
    def sampling(self) -> Sampling:
        """Sampling of a request that sets no sampling fields."""
        return Sampling(adapter=self.adapter, max_tokens=self.default_length or Sampling().max_tokens)

    @property
    def text(self) -> str | None:
        prompt = self.body.get("prompt")
        return prompt if isinstance(prompt, str) else None

    def exact_prompt(self, rendered: Callable[[], str], ids: list[int]) -> list[int]:
        if not (self.chat and self.keeps_answers):
            return ids
        text = rendered()
        if self.model.encode(text) != ids:  # the text can't stand for the ids
            return ids
        return self.exact_ids(text) or ids

    def exact_ids(self, text: str) -> list[int] | None:
        """Return the ids of a rendered prompt, in which earlier answers have the ids that were sampled. Return None
        if it continues no earlier answer."""
        if not (self.chat and self.keeps_answers):
            return None
        self.rendered = text
        return self.model.exact_prompt(text, self._earlier_prompts if "messages" in self.body else None)

    def _earlier_prompts(self) -> Iterator[str]:
        """Yield the rendered prompt before each answer in the messages, newest first."""
        with contextlib.suppress(ApiError, WorkflowError):  # for messages that only the engine's own server can read
            messages = parse_messages(self.body["messages"])
            yield from self.model.earlier_prompts(messages, parse_tools(self.body), template_variables(self.body))

    def begin(self, sampling: Sampling, further: dict[str, Any], text: str | None = None) -> Generation:
        version = self.model.engine.model_version
        self.generations.append(Generation(text=text, sampling=sampling, further=further, model_version=version))
        return self.generations[-1]

    def begin_journaled_call(
        self, ids: list[int], sampling: Sampling, further: Mapping[str, Any], forbids: str
    ) -> JournaledCall | None:
        model = self.model
        if model.journal is None:
            return None
        return model.journal.call(model.engine, model.name, ids, sampling, further, forbids)

    def fail(self, error: EngineError) -> None:
        """Note that the engine failed, and report the first failure to `failed_with`."""
        if self.failed is None:
            self.failed = error
            self.failed_with(error)

    def is_complete(self) -> bool:
        """Return True if there were calls to the engine, and all of them are answered."""
        return bool(self.generations) and all(g.completions is not None for g in self.generations)

    def experiences(self) -> list[Experience]:
        """Return an experience for each answer, in the order of the prompts, and add them to the run's history.

        Raises EngineError for an answer that was cut off.
        """
        answers = []
        messages = self.body.get("messages") if self.chat else None
        for call in self.generations:
            for completion, experience in self.model.with_experiences(
                call.completions or [], call.model_version, call.text, call.sampling
            ):
                experience.info["model_version"] = call.model_version
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
"""Record of the request for which the current task calls the engine."""
