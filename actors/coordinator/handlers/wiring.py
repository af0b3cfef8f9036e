"""All that clients may ask of a coordinator, put together: one object a kind, and the router over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.dynamic_timeout import DynamicTimeout
from trinity_es.actors.coordinator.fleet.lifecycle import RunnerLifecycle
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
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.requests_in_hand import RequestsInHand
from trinity_es.actors.settings import Settings

__all__ = ["Handlers"]


class Handlers:
    """The handlers of every command; the router has them all."""

    def __init__(
        self, config: Settings, live: LiveState, fleet: RunnerLifecycle, jobs: PipelineThread,
        retention: Retention,
        outputs: Outputs, actor: TimerHost, *, guardian: Any, hands: RequestsInHand, epoch: int = 0,
        trouble: Callable[[], str | None] = lambda: None, refuses: Callable[[], bool] = lambda: False,
    ) -> None:
        """`epoch`: of the coordinator. `trouble`, `refuses`: see StatusHandlers."""
        self.hands = hands
        self.router = router = CommandRouter(live, actor, lambda: fleet.end(), hands)
        self.pace = DynamicTimeout(config.explorer, live)
        self.queue = ExperienceQueue(config.buffer.queue, live, router, actor, fleet.clock)
        self.scheduler = SchedulerHandlers(config, live, fleet, self.pace, router, actor)
        self.trainer = TrainerHandlers(config, live, router, actor, self.queue, retention)
        self.batches = BatchHandlers(
            config, live, fleet, jobs, hands, outputs, router, actor,
            pace=self.pace, queue=self.queue, scheduler=self.scheduler, trainer=self.trainer,
        )
        self.answers = AnswerHandlers(live, outputs, router, self.batches.run_job)
        self.routes = RouteHandlers(fleet, router, actor)
        self.weights = WeightHandlers(fleet.weights, router, actor)
        self.runners = RunnerHandlers(router, fleet, actor, guardian)
        self.status = StatusHandlers(
            live, fleet, outputs, router, batches=self.batches, queue=self.queue, routes=self.routes, epoch=epoch,
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
