"""The workflow `verifiers`: an episode of an environment of verifiers, whose model is this run's.

The episode is played by the environment's own process, with verifiers' own client of token ids, which asks the model by
this run's endpoint. So what is learned from is what the engine sampled, and is checked against that, id by id: an
experience for each branch of a trace that can be trained on, with the trace's reward. A failure has the kind that
verifiers gives it, and is never a reward.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from typing import Any

from trinity_es.environments.installed import PROGRAM, find
from trinity_es.environments.server import server_of
from trinity_es.environments.verifiers_tasks import environment_config, environment_named
from trinity_es.events.errors import EnvironmentFailed, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import FailureKind
from trinity_es.workflows.workflow import Workflow

__all__ = ["VerifiersWorkflow", "failure_of"]

INFRA = frozenset({"ProviderError", "SandboxError", "TunnelError", "InterceptionError"})
"""verifiers' errors for which neither the task nor its code is to blame."""
_PRECEDENCE: tuple[FailureKind, ...] = ("infra", "timeout", "workflow")


class VerifiersWorkflow(Workflow):
    """An episode of an environment of verifiers, by `workflow_args.env`; `path: verifiers:NAME` sets both.

    The task's row is the environment's task.

    `workflow_args`: `env`, the name of an installed environment; `config`, what verifiers calls `env`
    (`{agent: {max_turns: 4}, taskset: {...}}`); `renderer` and `tokenizer`, where those of the model are not to be
    used, as verifiers' TrainClient has them (`renderer`, `renderer_model_name`).
    """

    is_async = True
    ARGS = frozenset({"env", "config", "renderer", "tokenizer", "tasks"})

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        installed = await asyncio.to_thread(find, environment_named(args))
        server = await server_of(installed, PROGRAM, environment_config(installed, args))
        endpoint = self.model.openai_endpoint()
        episode = await server.ask({"run": {
            "task": self.task.raw_task, "base_url": endpoint.base_url, "token": endpoint.token, "model": endpoint.model,
            "tokenizer": args.get("tokenizer") or _tokenizer(self.model.tokenizer),
            "renderer": args.get("renderer"),
        }})
        failure = failure_of(episode)
        if failure is not None:
            raise self.model.served_error() or failure
        return self._experiences(episode["traces"], f"{installed.name} {installed.version}".rstrip())

    def _experiences(self, traces: list[dict[str, Any]], environment: str) -> list[Experience]:
        trained = [t for t in traces if t["trainable"] and t["ok"]]
        found: list[Experience] = []
        for trace in trained:
            metrics = _numbers({**trace["metrics"], **trace["rewards"], "reward": trace["reward"]})
            branches = [(b["tokens"], [tuple(a) for a in b["answers"]], b["messages"]) for b in trace["branches"]]
            for experience in self.model.experiences_of_ids(branches):
                experience.reward, experience.metrics = metrics["reward"], dict(metrics)
                experience.info |= {"environment": environment, "agent": trace["agent"], "stop": trace["stop"]}
                experience.eid.step = len(found)
                found.append(experience)
        if not found:
            raise WorkflowError("the environment ended the episode before the model said anything")
        if not any(t["rewards"] for t in trained):
            raise WorkflowError("the environment gave no reward to any agent that is trained: a sum of nothing is none")
        return found


def failure_of(episode: Mapping[str, Any]) -> EnvironmentFailed | None:
    """Return why an episode has no result; None where it has one.

    Of several failures the one that says least about the task: a sandbox that died goes before the code that missed it.
    A model's call that failed, and that nothing made good, is a failure even where the agent took it for the end.
    """
    parts = [episode, *(t for t in episode["traces"] if not episode["complete"] or t["is_timeout"])]
    errors = [e for part in parts for e in part["errors"]]
    errors += [e for trace in episode["traces"] if trace["ok"] for e in trace["unanswered"]]
    found: list[tuple[FailureKind, str]] = [
        ("infra" if e["type"] in INFRA else "workflow", f"{e['type']}: {e['message']}") for e in errors]
    found += [("timeout", f"{part.get('stop') or 'episode'}: out of time, as the environment limits it")
              for part in parts if part["is_timeout"]]
    if not found and not episode["complete"]:
        found.append(("workflow", "the environment did not complete the episode, and says no error"))
    if not found:
        return None
    kind, message = min(found, key=lambda f: _PRECEDENCE.index(f[0]))
    return EnvironmentFailed(message, kind=kind)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    for name, value in metrics.items():
        if isinstance(value, str):  # as JSON has infinity, and what is no number
            raise WorkflowError(f"the environment gave {name} = {value}: a number is expected")
    return {name: float(value) for name, value in metrics.items()}


def _tokenizer(tokenizer: Any) -> str:
    """Return the folder, or the name, that transformers loads this tokenizer by."""
    name = getattr(tokenizer, "name_or_path", "")
    if name:
        return str(name)
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        raise WorkflowError("the model's tokenizer has no folder: name one as workflow_args.tokenizer")
    if tokenizer not in _saved:
        folder = tempfile.TemporaryDirectory(prefix="trinity-es-tokenizer-")
        save(folder.name)
        _saved[tokenizer] = folder
    return str(_saved[tokenizer].name)


_saved: dict[Any, tempfile.TemporaryDirectory[str]] = {}
"""Folders of tokenizers that were made in memory: those of tests."""
