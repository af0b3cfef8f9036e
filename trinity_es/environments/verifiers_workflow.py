"""The workflow `verifiers`: an episode of a verifiers environment, played with this run's model.

The environment's own process plays the episode. verifiers' token-id client calls the model at this run's endpoint, so
training uses exactly the ids that the engine sampled; the workflow checks each id. Each trainable branch of a trace
becomes an experience with the trace's reward. A failure keeps verifiers' kind, and never becomes a reward.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from typing import Any

from trinity_es.environments.environment_process import server_of
from trinity_es.environments.installs import PROGRAM, find
from trinity_es.environments.verifiers_tasks import environment_config, environment_name
from trinity_es.events.errors import EnvironmentFailed, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import FailureKind
from trinity_es.workflows.workflow import Workflow

__all__ = ["VerifiersWorkflow", "failure_of"]

INFRA = frozenset({"ProviderError", "SandboxError", "TunnelError", "InterceptionError"})
"""verifiers' errors that neither the task nor its code caused."""
_PRECEDENCE: tuple[FailureKind, ...] = ("infra", "timeout", "workflow")


class VerifiersWorkflow(Workflow):
    """Episode of the verifiers environment `workflow_args.env`. Its task is the row of this task.

    A taskset with `path: verifiers:NAME` sets the workflow and its `env`. `workflow_args`: `env`, the name of an
    installed environment; `config`, which verifiers calls `env` (`{agent: {max_turns: 4}, taskset: {...}}`); `renderer`
    and `tokenizer`, which replace the model's (`renderer` and `renderer_model_name` of verifiers' TrainClient).
    """

    is_async = True
    ARGS = frozenset({"env", "config", "renderer", "tokenizer", "tasks"})

    async def run_async(self) -> list[Experience]:
        """Play the episode. Raises EnvironmentFailed, or the error with which this run's endpoint answered a call."""
        args = self.task.workflow_args
        installed = await asyncio.to_thread(find, environment_name(args))
        server = await server_of(installed, PROGRAM, environment_config(installed, args))
        endpoint = self.model.openai_endpoint()
        episode = await server.ask({"run": {
            "task": self.task.raw_task, "base_url": endpoint.base_url, "token": endpoint.token, "model": endpoint.model,
            "tokenizer": args.get("tokenizer") or _tokenizer_path(self.model.tokenizer),
            "renderer": args.get("renderer"),
        }})
        failure = failure_of(episode)
        if failure is not None:
            raise self.model.served_error() or failure
        return self._experiences(episode["traces"], f"{installed.name} {installed.version}".rstrip())

    def _experiences(self, traces: list[dict[str, Any]], environment: str) -> list[Experience]:
        """Return an experience for each branch of each trained agent. Raises WorkflowError if no agent has a reward."""
        trained_traces = [trace for trace in traces if trace["trainable"] and trace["ok"]]
        experiences: list[Experience] = []
        for trace in trained_traces:
            metrics = _as_floats({**trace["metrics"], **trace["rewards"], "reward": trace["reward"]})
            branches = [(branch["tokens"], [tuple(span) for span in branch["answers"]], branch["messages"])
                        for branch in trace["branches"]]
            for experience in self.model.experiences_of_ids(branches):
                experience.reward, experience.metrics = metrics["reward"], dict(metrics)
                experience.info |= {"environment": environment, "agent": trace["agent"], "stop": trace["stop"]}
                experience.eid.step = len(experiences)
                experiences.append(experience)
        if not experiences:
            raise WorkflowError("the environment ended the episode before the model answered")
        if not any(trace["rewards"] for trace in trained_traces):
            raise WorkflowError("the environment gave no reward to any trained agent, so the episode has none")
        return experiences


def failure_of(episode: Mapping[str, Any]) -> EnvironmentFailed | None:
    """Return the failure of an episode without a result; None if the episode has a result.

    Of several failures, returns the one least related to the task: a dead sandbox before an error of the code in it. A
    failed model call without a later success is a failure, even if the agent took it for the end of the episode.
    """
    parts = [episode, *(trace for trace in episode["traces"] if not episode["complete"] or trace["is_timeout"])]
    errors = [error for part in parts for error in part["errors"]]
    errors += [error for trace in episode["traces"] if trace["ok"] for error in trace["unanswered"]]
    failures: list[tuple[FailureKind, str]] = [
        ("infra" if error["type"] in INFRA else "workflow", f"{error['type']}: {error['message']}") for error in errors]
    failures += [("timeout", f"{part.get('stop') or 'episode'}: out of time, as the environment limits it")
                 for part in parts if part["is_timeout"]]
    if not failures and not episode["complete"]:
        failures.append(("workflow", "the environment did not complete the episode, but reports no error"))
    if not failures:
        return None
    kind, message = min(failures, key=lambda failure: _PRECEDENCE.index(failure[0]))
    return EnvironmentFailed(message, kind=kind)


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    for name, value in metrics.items():
        if isinstance(value, str):  # infinity or NaN, see verifiers_main.as_number
            raise WorkflowError(f"the environment gave {name} = {value}: a number is expected")
    return {name: float(value) for name, value in metrics.items()}


def _tokenizer_path(tokenizer: Any) -> str:
    """Return the folder or name from which transformers loads this tokenizer. If it has none, write a folder."""
    name = getattr(tokenizer, "name_or_path", "")
    if name:
        return str(name)
    save_pretrained = getattr(tokenizer, "save_pretrained", None)
    if save_pretrained is None:
        raise WorkflowError("the model's tokenizer has no folder to load it from: set workflow_args.tokenizer to one")
    if tokenizer not in _tokenizer_folders:
        folder = tempfile.TemporaryDirectory(prefix="trinity-es-tokenizer-")
        save_pretrained(folder.name)
        _tokenizer_folders[tokenizer] = folder
    return str(_tokenizer_folders[tokenizer].name)


_tokenizer_folders: dict[Any, tempfile.TemporaryDirectory[str]] = {}
"""Folders of tokenizers that exist only in memory, as in tests."""
