"""What a task does with a model: the base classes, those that come with the package, and their short names."""

from trinity_es.workflows.workflow import WORKFLOWS, MultiTurnWorkflow, SingleTurnWorkflow, Workflow, WorkflowRegistry

__all__ = ["WORKFLOWS", "MultiTurnWorkflow", "SingleTurnWorkflow", "Workflow", "WorkflowRegistry"]
