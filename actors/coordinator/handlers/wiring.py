"""The parts of a coordinator, put together: its runners, and the handlers of all that clients may ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.dynamic_timeout import DynamicTimeout
from trinity_es.actors.coordinator.fleet.hosts import HostFleet
from trinity_es.actors.coordinator.fleet.leases import LeaseFleet, Releases
from trinity_es.actors.coordinator.fleet.lifecycle import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.servers import ServerFleet
from trinity_es.actors.coordinator.fleet.weights import Rolling, WeightLoading
from trinity_es.actors.coordinator.handlers.adapters import AdapterHandlers
from trinity_es.actors.coordinator.handlers.batches import BatchHandlers
from trinity_es.actors.coordinator.handlers.experiences import ExperienceQueue
from trinity_es.actors.coordinator.handlers.hosts import HostHandlers
from trinity_es.actors.coordinator.handlers.router import CommandRouter
from trinity_es.actors.coordinator.handlers.runner_commands import RunnerHandlers
from trinity_es.actors.coordinator.handlers.scheduler import SchedulerHandlers
from trinity_es.actors.coordinator.handlers.serve_answers import AnswerHandlers
from trinity_es.actors.coordinator.handlers.serve_routes import RouteHandlers
from trinity_es.actors.coordinator.handlers.servers import ServerHandlers
from trinity_es.actors.coordinator.handlers.status import StatusHandlers
from trinity_es.actors.coordinator.handlers.trainer import TrainerHandlers
from trinity_es.actors.coordinator.handlers.weights import WeightHandlers
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.requests_in_hand import RequestsInHand
from trinity_es.events.store.checks.log_end import Mark

__all__ = ["Handlers"]


class Handlers:
    """The runners (`fleet`), and the handlers of every command; the router has them all."""

    def __init__(
        self, config: LaunchedConfig, live: LiveState, pipeline: PipelineThread, retention: Retention, outputs: Outputs,
        actor: TimerHost, *, guardian: Any, in_hand: RequestsInHand, releases: Releases,
        end: Callable[[], Mark | None] = lambda: None, alive: Iterable[str] = (), epoch: int = 0,
        trouble: Callable[[], str | None] = lambda: None, refuses: Callable[[], bool] = lambda: False,
        hosts: Callable[[], HostFleet | None] = lambda: None,
    ) -> None:
        """`releases`: releases leases. `end`: the end of the log, as it may be told. `alive`: runners that have a
        process. `epoch`: of the coordinator. `trouble`, `refuses`: see StatusHandlers. `hosts`: those that joined.
        """
        self.in_hand = in_hand
        registry = RunnerRegistry(live, actor)
        dynamic_timeout = DynamicTimeout(config.explorer, live)
        self.router = router = CommandRouter(live, actor, end, in_hand)
        self.routes = RouteHandlers(registry, router, actor)
        rolling = None
        if config.mode == "serve":
            rolling = Rolling(config.explorer.min_running_model_num, self.routes.take_out, alive)
        dispatcher = Dispatcher(registry, dynamic_timeout.timeout, end)
        lora = config.rollout.lora
        most = 0 if lora is None else lora.max_adapters
        of_others = config.rollout.engine_type == "http"
        weights = WeightLoading(registry, rolling)
        models = {"rollout", config.rollout.model_path, *config.auxiliary}
        self.fleet = RunnerLifecycle(registry, weights, dispatcher, most, servers=of_others, models=models)
        self.leases = LeaseFleet(registry, actor, releases)
        self.queue = ExperienceQueue(config.buffer.queue, live, router, actor, registry.clock)
        self.scheduler = SchedulerHandlers(config, live, dispatcher, dynamic_timeout, router, actor)
        self.trainer = TrainerHandlers(config, live, router, actor, self.queue, retention)
        self.batches = BatchHandlers(
            config, live, dispatcher, pipeline, in_hand, outputs, router, actor,
            dynamic_timeout=dynamic_timeout, queue=self.queue, scheduler=self.scheduler, trainer=self.trainer,
        )
        self.answers = AnswerHandlers(live, outputs, router, self.batches.run_job)
        self.weights = WeightHandlers(self.fleet.weights, router, actor)
        self.adapters = AdapterHandlers(self.fleet.adapters, router, actor)
        guardian_of = lambda name: guardian if (fleet := hosts()) is None else fleet.guardian_of(name, guardian)  # noqa: E731
        self.runners = RunnerHandlers(router, registry, actor, guardian_of)
        self.servers = ServerFleet(
            config.rollout.servers if of_others else None, registry, guardian, proxied=config.mode == "serve")
        self.status = StatusHandlers(
            live, registry, outputs, router, batches=self.batches, queue=self.queue, routes=self.routes, epoch=epoch,
            trouble=trouble, refuses=refuses, servers=self.servers, leases=self.leases,
            hosts=lambda: [] if (fleet := hosts()) is None else fleet.status(),
        )
        router.connect(
            row
            for kind in (
                self.batches, self.scheduler, self.trainer, self.queue, self.weights, self.adapters, self.runners,
                self.answers, self.routes, self.status, ServerHandlers(self.servers, router),
                HostHandlers(hosts, router),
            )
            for row in kind.handlers()
        )
