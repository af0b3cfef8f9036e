"""trinity_es runs the rollouts of LLM reinforcement learning and never loses one.

Every public name is here: values, clients (`connect`, `RolloutCoordinator`, `Explorer`), the config, workflows,
`Trainer`, errors, and `open_log`, which reads a log. Names are loaded on first use, so reading a log imports no actor
system, and nothing imports torch or vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_es import errors
    from trinity_es.actors.coordinator.delivery.operators import ExperienceOperator, ExperienceOperatorV1, Operator
    from trinity_es.actors.coordinator.delivery.outputs import Output
    from trinity_es.actors.coordinator.handlers.experience_queue import Candidate
    from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
    from trinity_es.client.async_client import RolloutCoordinator
    from trinity_es.client.rollout_client import RolloutClient, connect
    from trinity_es.client.scheduler import Scheduler
    from trinity_es.client.start_or_join import running
    from trinity_es.config.config import Config, load_config
    from trinity_es.events.errors import TrinityError
    from trinity_es.events.experience import EID, Experience
    from trinity_es.events.experience_columns import ExperienceColumns
    from trinity_es.events.software_version import VERSION
    from trinity_es.events.values import BatchLifecycleState, Status, Task, TaskWrapper, sort_batch_id
    from trinity_es.hf_datasets import from_hf_datasets, to_hf_datasets
    from trinity_es.projections.batch import BatchState
    from trinity_es.projections.reading.log_reader import Log, open_log
    from trinity_es.run.explorer import Explorer
    from trinity_es.run.trainer import Trainer
    from trinity_es.telemetry.monitor_services import Monitor
    from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS
    from trinity_es.workflows.rewards import RewardFn
    from trinity_es.workflows.simple import AsyncSimpleWorkflow, SimpleWorkflow
    from trinity_es.workflows.workflow import MultiTurnWorkflow, SingleTurnWorkflow, Workflow

    __version__ = VERSION

__all__ = [
    "EID", "REWARD_FUNCTIONS", "WORKFLOWS", "AsyncSimpleWorkflow", "BatchLifecycleState", "BatchState", "Candidate",
    "Config", "Experience", "ExperienceColumns", "ExperienceOperator", "ExperienceOperatorV1", "Explorer", "Log",
    "Monitor", "MultiTurnWorkflow", "Operator", "Output", "RewardFn", "RolloutClient", "RolloutCoordinator",
    "Scheduler", "SimpleWorkflow", "SingleTurnWorkflow", "Status", "Task", "TaskWrapper", "Trainer", "TrinityError",
    "Workflow", "WorkflowRunner", "__version__", "connect", "errors", "from_hf_datasets", "load_config", "open_log",
    "running", "sort_batch_id", "to_hf_datasets",
]

_NAMES_BY_MODULE = {
    "actors.coordinator.delivery.operators": "ExperienceOperator ExperienceOperatorV1 Operator",
    "actors.coordinator.delivery.outputs": "Output",
    "actors.coordinator.handlers.experience_queue": "Candidate",
    "actors.rollout.workflow_runner": "WorkflowRunner",
    "client.async_client": "RolloutCoordinator",
    "client.rollout_client": "RolloutClient connect",
    "client.start_or_join": "running",
    "client.scheduler": "Scheduler",
    "config.config": "Config load_config",
    "events.errors": "TrinityError",
    "events.experience": "EID Experience",
    "events.experience_columns": "ExperienceColumns",
    "events.values": "BatchLifecycleState Status Task TaskWrapper sort_batch_id",
    "hf_datasets": "from_hf_datasets to_hf_datasets",
    "projections.batch": "BatchState",
    "projections.reading.log_reader": "Log open_log",
    "run.explorer": "Explorer",
    "run.trainer": "Trainer",
    "telemetry.monitor_services": "Monitor",
    "workflows.registry": "REWARD_FUNCTIONS WORKFLOWS",
    "workflows.rewards": "RewardFn",
    "workflows.simple": "AsyncSimpleWorkflow SimpleWorkflow",
    "workflows.workflow": "MultiTurnWorkflow SingleTurnWorkflow Workflow",
}
_MODULE_BY_NAME = {name: f"trinity_es.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from trinity_es.events.software_version import VERSION

        return VERSION
    if name == "errors":
        return importlib.import_module("trinity_es.errors")
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module 'trinity_es' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
