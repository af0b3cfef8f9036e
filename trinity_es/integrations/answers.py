"""Workflows of one prompt and one answer, which tokenize prompts exactly as TRL and verl do.

Messages are rendered by the chat template, with the trainer's `chat_template_kwargs`. Plain text is completed as it
is, and not wrapped into a chat message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.workflows.workflow import SingleTurnWorkflow

__all__ = ["ANSWERS", "PROMPTS", "AnswerWorkflow", "PromptWorkflow", "require_no_format"]

PROMPTS, ANSWERS = (f"{__name__}:{name}" for name in ("PromptWorkflow", "AnswerWorkflow"))
"""Names of the two workflows in a task; `AnswerWorkflow` gives no rewards."""


def require_no_format(workflow: str, format_args: Mapping[str, Any]) -> None:
    """Raise ConfigError if `workflow` is one of this module, which sends prompts unchanged, and would ignore a key."""
    refused_keys = sorted({"system_prompt", "reply_prefix"} & set(format_args))
    if workflow in (PROMPTS, ANSWERS) and refused_keys:
        raise ConfigError(
            f"format_args has {refused_keys[0]}, but the trainer's prompts are sent unchanged: put its text into the "
            "prompts, as messages, or name a workflow that builds the chat, such as single_turn"
        )


class PromptWorkflow(SingleTurnWorkflow):
    """Workflow of one prompt, one answer and one reward. The engine gets all runs of the task as one request.

    `workflow_args["chat_template_kwargs"]`: further variables of the chat template.
    """

    ARGS = frozenset({"chat_template_kwargs"})

    async def _answers(self) -> list[Experience]:
        """Ask for all runs at once. Text is completed as it is; messages are rendered by the chat template."""
        prompt, template = self.task.task_desc, self.task.workflow_args.get("chat_template_kwargs")
        answers: list[Experience]
        if isinstance(prompt, str):
            answers = await self.model.generate_async(prompt, n=self.repeat_times)
        elif not template:
            answers = await super()._answers()
        else:
            messages = self.prompt_messages()
            ids, _ = await self.model.prompt_of(messages, None, template)
            answers = await self.model.generate_async(ids, n=self.repeat_times)
            for answer in answers:
                answer.messages = [*messages, {"role": "assistant", "content": answer.response_text}]
        return answers


class AnswerWorkflow(PromptWorkflow):
    """PromptWorkflow without a reward, for trainers that reward answers themselves."""

    async def run_async(self) -> list[Experience]:
        """Return the answers, each with the number of its run."""
        answers = await self._answers()
        for run, answer in enumerate(answers, self.run_id_base):
            answer.eid.run = run
        return answers
