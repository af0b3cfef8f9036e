"""What a task does with a model: the base classes, those that come with the package, and their short names."""

from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS, WorkflowRegistry
from trinity_es.workflows.workflow import MultiTurnWorkflow, SingleTurnWorkflow, Workflow

__all__ = [
    "REWARD_FUNCTIONS", "WORKFLOWS", "MultiTurnWorkflow", "SingleTurnWorkflow", "Workflow", "WorkflowRegistry",
]
