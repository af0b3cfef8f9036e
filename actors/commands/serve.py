"""Commands of the proxy of mode `serve`."""

from __future__ import annotations

from typing import TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import AnswerGiven, Name, Number, ShortText, TableNumber, Whole

__all__ = [
    "CountAnswers", "DeliverAnswers", "DeliveredAnswers", "EngineRoute", "GetRoutes", "RecordAnswers",
    "RewardAnswers", "RouteTable",
]


# --- the proxy of mode `serve` ----------------------------------------------------------------------------------------
class RecordAnswers(Command[int], name="record_answers", writes=True):
    """Record the proxy's answers to its clients, and return how many of them were new."""

    answers: list[AnswerGiven]


class RewardAnswers(Command[int], name="reward_answers", writes=True):
    """Give a reward to all of these answers, or to none, and return their number. Raises AnswerNotFound, or
    AnswerDelivered if an answer went to the pipeline with another reward."""

    messages: list[Name]
    """Ids of the answers, as clients got them."""
    reward: Number
    task: ShortText | None
    """Task of the answers, which is their group in the pipeline; null: each answer is a task of its own."""
    run: Whole | None
    """Number of the task's run that made the answers; null: 0."""


class DeliveredAnswers(TypedDict):
    """Number of answers that went through the pipeline, and its metrics."""

    count: int
    metrics: dict[str, float]


class DeliverAnswers(Command[DeliveredAnswers], name="deliver_answers", writes=True):
    """Run all rewarded answers through the pipeline. Answers without a reward stay. Raises PipelineError."""


class CountAnswers(Command[dict[str, int]], name="answers", writes=False):
    """Count the answers: `recorded` (without a reward), `rewarded`, `delivered`."""


class EngineRoute(TypedDict):
    """An incarnation (process) of a runner, and the endpoint of its engine."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int
    serving: bool
    """False while the engine loads weights, when it gets no requests."""


class RouteTable(TypedDict):
    """Endpoints of all engines. A changed table has a new number."""

    number: int
    engines: list[EngineRoute]


class GetRoutes(Command[RouteTable], name="routes", writes=False, waits=True):
    """Return the table of engines once its number differs from `knows`, or after two seconds."""

    proxy: Name
    """A unique name of the proxy."""
    url: ShortText
    """URL at which the proxy serves."""
    knows: TableNumber
    """Number of the table that the proxy has."""
