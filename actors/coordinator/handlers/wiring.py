"""All that clients may ask of a coordinator, put together: one object a kind, and the router over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineJobs
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.dynamic_timeout import Pace
from trinity_es.actors.coordinator.fleet.lifecycle import Crew
from trinity_es.actors.coordinator.handlers.answers import AnswerHandlers
from trinity_es.actors.coordinator.handlers.batches import BatchHandlers
from trinity_es.actors.coordinator.handlers.experiences import ExperienceQueue
from trinity_es.actors.coordinator.handlers.router import CommandRouter
from trinity_es.actors.coordinator.handlers.routes import RouteHandlers
from trinity_es.actors.coordinator.handlers.runners import RunnerHandlers
from trinity_es.actors.coordinator.handlers.scheduler import SchedulerHandlers
from trinity_es.actors.coordinator.handlers.status import StatusHandlers
from trinity_es.actors.coordinator.handlers.trainer import TrainerHandlers
from trinity_es.actors.coordinator.handlers.weights import WeightHandlers
from trinity_es.actors.coordinator.live_state import Book
from trinity_es.actors.coordinator.ports import Timers
from trinity_es.actors.coordinator.requests_in_hand import Hands

__all__ = ["Handlers"]


class Handlers:
    """The handlers of every command; the router has them all."""

    def __init__(
        self, config: dict[str, Any], book: Book, crew: Crew, jobs: PipelineJobs, retention: Retention,
        outputs: Outputs, actor: Timers, *, guardian: Any, hands: Hands, epoch: int = 0,
        trouble: Callable[[], str | None] = lambda: None, refuses: Callable[[], bool] = lambda: False,
    ) -> None:
        """`epoch`: of the coordinator. `trouble`, `refuses`: see StatusHandlers."""
        self.hands = hands
        self.router = router = CommandRouter(book, actor, lambda: crew.end(), hands)
        self.pace = Pace(config["explorer"], book)
        self.queue = ExperienceQueue(config["buffer"]["queue"], book, router, actor, crew.clock)
        self.scheduler = SchedulerHandlers(config, book, crew, self.pace, router, actor)
        self.trainer = TrainerHandlers(config, book, router, actor, self.queue, retention)
        self.batches = BatchHandlers(
            config, book, crew, jobs, hands, outputs, router, actor,
            pace=self.pace, queue=self.queue, scheduler=self.scheduler, trainer=self.trainer,
        )
        self.answers = AnswerHandlers(book, outputs, router, self.batches.run_job)
        self.routes = RouteHandlers(crew, router, actor)
        self.weights = WeightHandlers(crew.weights, router, actor)
        self.runners = RunnerHandlers(router, crew, actor, guardian)
        self.status = StatusHandlers(
            book, crew, outputs, router, batches=self.batches, queue=self.queue, routes=self.routes, epoch=epoch,
            trouble=trouble, refuses=refuses,
        )
        router.asked_again = self.queue.asked_again
        router.connect(
            row
            for kind in (
                self.batches, self.scheduler, self.trainer, self.queue, self.weights, self.runners, self.answers,
                self.routes, self.status,
            )
            for row in kind.handlers()
        )
