"""Workflows: the base classes, ready-made workflows and rewards, and their short names."""

from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS, WorkflowRegistry
from trinity_es.workflows.workflow import MultiTurnWorkflow, SingleTurnWorkflow, Workflow

__all__ = [
    "REWARD_FUNCTIONS", "WORKFLOWS", "MultiTurnWorkflow", "SingleTurnWorkflow", "Workflow", "WorkflowRegistry",
]
