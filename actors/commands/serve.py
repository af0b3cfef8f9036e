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
    """Record what the proxy answers to its clients; answered with how many of them were new."""

    answers: list[AnswerGiven]


class RewardAnswers(Command[int], name="reward_answers", writes=True):
    """Give answers a reward, all of them or none; answered with how many they are.

    Raises AnswerNotFound; AnswerDelivered where one went to the pipeline with another.
    """

    messages: list[Name]
    """Ids, as clients got them."""
    reward: Number
    task: ShortText | None
    """Their group in the pipeline; null: each is a task of its own."""
    run: Whole | None
    """Which run of it; null: 0."""


class DeliveredAnswers(TypedDict):
    """How many answers went through the pipeline, and its metrics."""

    count: int
    metrics: dict[str, float]


class DeliverAnswers(Command[DeliveredAnswers], name="deliver_answers", writes=True):
    """Take all answers that are rewarded through the pipeline; what has no reward stays. Raises PipelineError."""



class CountAnswers(Command[dict[str, int]], name="answers", writes=False):
    """Count the answers: `recorded` (without a reward), `rewarded`, `delivered`."""



class EngineRoute(TypedDict):
    """One life of a runner, and where its engine is asked."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int
    serving: bool
    """False while it is taken out to load weights."""


class RouteTable(TypedDict):
    """Where engines are asked; each change has a number of its own."""

    number: int
    engines: list[EngineRoute]


class GetRoutes(Command[RouteTable], name="routes", writes=False, waits=True):
    """Tell a proxy which engines serve: when that is not what it knows, or after two seconds."""

    proxy: Name
    """Who asks: a name of its own."""
    url: ShortText
    """Where it serves."""
    knows: TableNumber
    """The table that it has."""
