"""Registries with the short names of workflows and rewards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.actors.plugin_lookup import registered, resolve
from trinity_es.events.errors import UnknownWorkflow
from trinity_es.events.values import class_path

__all__ = ["REWARD_FUNCTIONS", "WORKFLOWS", "WorkflowRegistry", "missing_package"]


class WorkflowRegistry:
    """Short names of workflow or reward classes, from installed packages and from `register_module`.

    A path "module:Class" needs no registration. `kind` is `workflow` or `reward`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._registered: dict[str, str] = {}

    @property
    def paths(self) -> Mapping[str, str]:
        """Return {name: "module:Class"}."""
        return {**registered(self.kind), **self._registered}

    def register_module(self, name: str) -> Callable[[Any], Any]:
        """Return a decorator that registers a class under this name. Raises UnknownWorkflow if another class has it."""

        def add(cls: Any) -> Any:
            path, present_path = class_path(cls), self.paths.get(name)
            if present_path not in (None, path):
                raise UnknownWorkflow(f"{self.kind} name {name!r} is taken by {present_path}: choose another")
            self._registered[name] = path
            return cls

        return add

    def path(self, workflow: type[Any] | str) -> str:
        """Return the "module:Class" of a class, a registered name or a path. Raises UnknownWorkflow for others."""
        name, paths = class_path(workflow), self.paths
        resolve(name, paths, self.kind)
        return paths.get(name, name)

    def get(self, name: str) -> type[Any]:
        return resolve(name, self.paths, self.kind)

    def names(self) -> list[str]:
        return sorted(self.paths)


WORKFLOWS = WorkflowRegistry("workflow")
"""The registry in which tasks and tasksets look up workflows."""

REWARD_FUNCTIONS = WorkflowRegistry("reward")
"""The registry in which tasks and tasksets look up rewards."""


def missing_package(workflow: str, reward_fn: str | None) -> str:
    """Return an error text if the reward needs a package that is not installed, else "". Raises UnknownWorkflow.

    `reward_fn` None: the workflow's default reward.
    """
    reward = reward_fn or getattr(WORKFLOWS.get(workflow), "default_reward", None)
    needs = getattr(REWARD_FUNCTIONS.get(reward), "needs", None) if reward else None
    if not needs:
        return ""
    module, extra = needs
    if importlib.util.find_spec(module) is not None:
        return ""
    return f'{reward} needs the package {module}: pip install "trinity-es[{extra}]"'
