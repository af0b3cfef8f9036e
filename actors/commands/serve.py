"""Commands of the proxy of mode `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import AnswerGiven, Name, Number, ShortText, TableNumber, Whole

__all__ = [
    "CountAnswers", "DeliverAnswers", "DeliveredAnswers", "EngineRoute", "GetRoutes", "RecordAnswers",
    "RewardAnswers", "RouteTable",
]


# --- the proxy of mode `serve` ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAnswers(Command[int]):
    """Record what the proxy answers to its clients; answered with how many of them were new."""

    name = "record_answers"
    writes = True
    answers: list[AnswerGiven]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAnswers(Command[int]):
    """Give answers a reward, all of them or none; answered with how many they are.

    Raises AnswerNotFound; AnswerDelivered where one went to the pipeline with another.
    """

    name = "reward_answers"
    writes = True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverAnswers(Command[DeliveredAnswers]):
    """Take all answers that are rewarded through the pipeline; what has no reward stays. Raises PipelineError."""

    name = "deliver_answers"
    writes = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CountAnswers(Command[dict[str, int]]):
    """Count the answers: `recorded` (without a reward), `rewarded`, `delivered`."""

    name = "answers"
    writes = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRoutes(Command[RouteTable]):
    """Tell a proxy which engines serve: when that is not what it knows, or after two seconds."""

    name = "routes"
    writes = False
    waits = True
    proxy: Name
    """Who asks: a name of its own."""
    url: ShortText
    """Where it serves."""
    knows: TableNumber
    """The table that it has."""
