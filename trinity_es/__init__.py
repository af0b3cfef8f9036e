"""trinity_es runs the rollouts of LLM reinforcement learning and never loses one.

All that users need is here: values, the clients (`connect`, `RolloutCoordinator`, `Explorer`), the config, workflows,
what a `Trainer` has, errors, and `open_log` for reading what happened. Names are loaded when they are first used, so
reading a log imports no actor system, and nothing imports torch or vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_es import errors
    from trinity_es.actors.coordinator.delivery.operators import ExperienceOperator, ExperienceOperatorV1, Operator
    from trinity_es.actors.coordinator.delivery.outputs import Output
    from trinity_es.actors.coordinator.handlers.experiences import Candidate
    from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
    from trinity_es.client.coordinator import RolloutCoordinator
    from trinity_es.client.rollout_client import RolloutClient, connect, running
    from trinity_es.client.scheduler import Scheduler
    from trinity_es.config.config import Config, load_config
    from trinity_es.events.errors import TrinityError
    from trinity_es.events.experience import EID, Experience
    from trinity_es.events.values import BatchLifecycleState, Status, Task, TaskWrapper, sort_batch_id
    from trinity_es.events.version import VERSION
    from trinity_es.hf_datasets import from_hf_datasets, to_hf_datasets
    from trinity_es.projections.batch import BatchState
    from trinity_es.projections.reading.log_reader import Log, open_log
    from trinity_es.run.explorer import Explorer
    from trinity_es.run.trainer import Trainer
    from trinity_es.telemetry.monitors import Monitor
    from trinity_es.workflows.simple import AsyncSimpleWorkflow, RewardFn, SimpleWorkflow
    from trinity_es.workflows.workflow import WORKFLOWS, MultiTurnWorkflow, SingleTurnWorkflow, Workflow

    __version__ = VERSION

__all__ = [
    "EID",
    "WORKFLOWS",
    "AsyncSimpleWorkflow",
    "BatchLifecycleState",
    "BatchState",
    "Candidate",
    "Config",
    "Experience",
    "ExperienceOperator",
    "ExperienceOperatorV1",
    "Explorer",
    "Log",
    "Monitor",
    "MultiTurnWorkflow",
    "Operator",
    "Output",
    "RewardFn",
    "RolloutClient",
    "RolloutCoordinator",
    "Scheduler",
    "SimpleWorkflow",
    "SingleTurnWorkflow",
    "Status",
    "Task",
    "TaskWrapper",
    "Trainer",
    "TrinityError",
    "Workflow",
    "WorkflowRunner",
    "__version__",
    "connect",
    "errors",
    "from_hf_datasets",
    "load_config",
    "open_log",
    "running",
    "sort_batch_id",
    "to_hf_datasets",
]

_HOME = {
    "EID": "trinity_es.events.experience",
    "Experience": "trinity_es.events.experience",
    "BatchLifecycleState": "trinity_es.events.values",
    "Status": "trinity_es.events.values",
    "Task": "trinity_es.events.values",
    "TaskWrapper": "trinity_es.events.values",
    "sort_batch_id": "trinity_es.events.values",
    "TrinityError": "trinity_es.events.errors",
    "Log": "trinity_es.projections.reading.log_reader",
    "open_log": "trinity_es.projections.reading.log_reader",
    "BatchState": "trinity_es.projections.batch",
    "WorkflowRunner": "trinity_es.actors.rollout.workflow_runner",
    "Candidate": "trinity_es.actors.coordinator.handlers.experiences",
    "ExperienceOperator": "trinity_es.actors.coordinator.delivery.operators",
    "ExperienceOperatorV1": "trinity_es.actors.coordinator.delivery.operators",
    "Operator": "trinity_es.actors.coordinator.delivery.operators",
    "Output": "trinity_es.actors.coordinator.delivery.outputs",
    "from_hf_datasets": "trinity_es.hf_datasets",
    "to_hf_datasets": "trinity_es.hf_datasets",
    "Monitor": "trinity_es.telemetry.monitors",
    "RolloutClient": "trinity_es.client.rollout_client",
    "connect": "trinity_es.client.rollout_client",
    "running": "trinity_es.client.rollout_client",
    "Config": "trinity_es.config.config",
    "load_config": "trinity_es.config.config",
    "Explorer": "trinity_es.run.explorer",
    "RolloutCoordinator": "trinity_es.client.coordinator",
    "Scheduler": "trinity_es.client.scheduler",
    "Trainer": "trinity_es.run.trainer",
    "WORKFLOWS": "trinity_es.workflows.workflow",
    "MultiTurnWorkflow": "trinity_es.workflows.workflow",
    "SingleTurnWorkflow": "trinity_es.workflows.workflow",
    "Workflow": "trinity_es.workflows.workflow",
    "AsyncSimpleWorkflow": "trinity_es.workflows.simple",
    "RewardFn": "trinity_es.workflows.simple",
    "SimpleWorkflow": "trinity_es.workflows.simple",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from trinity_es.events.version import VERSION

        return VERSION
    if name == "errors":
        return importlib.import_module("trinity_es.errors")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trinity_es' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
