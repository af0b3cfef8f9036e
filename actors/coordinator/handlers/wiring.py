"""Construction of a coordinator's parts: the fleet of runners, and the handlers of all commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from trinity_es.actors.commands import CommandRequest, GetStatus
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.dynamic_timeout import DynamicTimeout
from trinity_es.actors.coordinator.fleet.external_servers import ServerFleet
from trinity_es.actors.coordinator.fleet.host_fleet import HostFleet
from trinity_es.actors.coordinator.fleet.lease_tracker import LeaseTracker, Release
from trinity_es.actors.coordinator.fleet.lost_journals import LostJournals
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.weight_loading import Rolling, WeightLoading
from trinity_es.actors.coordinator.handlers.batch_delivery import TrainerHandlers
from trinity_es.actors.coordinator.handlers.batches import BatchHandlers
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, handler_row
from trinity_es.actors.coordinator.handlers.experience_queue import ExperienceQueue
from trinity_es.actors.coordinator.handlers.runner_commands import RunnerHandlers
from trinity_es.actors.coordinator.handlers.scheduler import SchedulerHandlers
from trinity_es.actors.coordinator.handlers.serve_answers import AnswerHandlers
from trinity_es.actors.coordinator.handlers.serve_routes import RouteHandlers
from trinity_es.actors.coordinator.handlers.servers_and_hosts import MachineHandlers
from trinity_es.actors.coordinator.handlers.weight_commands import LoadHandlers
from trinity_es.actors.coordinator.log_session import LogSession
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.values import sort_batch_id
from trinity_es.projections.adapter_versions import current_adapters

__all__ = ["Handlers"]


class Handlers:
    def __init__(
        self, config: LaunchedConfig, session: LogSession, pipeline: PipelineThread, retention: Retention,
        outputs: Outputs, actor: TimerHost, *, guardian: Any, in_hand: RequestsInHand, release: Release,
        alive: Iterable[str] = (), hosts: Callable[[], HostFleet | None] = lambda: None,
    ) -> None:
        """`alive` are the runners that have a process. `hosts` returns the hosts that joined, or None if hosts can't
        join this run."""
        live = session.live
        self.live, self.session, self.in_hand, self.outputs, self.hosts = live, session, in_hand, outputs, hosts
        registry = RunnerRegistry(live, actor)
        dynamic_timeout = DynamicTimeout(config.explorer, live)
        self.router = router = CommandRouter(live, actor, session.log_end, in_hand)
        self.routes = RouteHandlers(registry, router)
        rolling = None
        if config.mode == "serve":
            rolling = Rolling(config.explorer.min_running_model_num, self.routes.take_out, alive)
        open_store = None
        if config.explorer.progress.seconds > 0:
            open_store = functools.partial(open_journals, config.store.url, durability=config.store.durability)
        self.journals = LostJournals(live, open_store, registry.living_processes)
        dispatcher = Dispatcher(registry, dynamic_timeout.timeout, session.log_end, self.journals.is_unread)
        lora = config.rollout.lora
        max_adapters = 0 if lora is None else lora.max_adapters
        on_servers = config.rollout.engine_type == "http"
        weights = WeightLoading(registry, rolling)
        models = {"rollout", config.rollout.model_path, *config.auxiliary}
        self.fleet = RunnerLifecycle(
            registry, weights, dispatcher, max_adapters, on_servers=on_servers, models=models)
        self.leases = LeaseTracker(registry, release, self.journals.is_unread)
        self.queue = ExperienceQueue(config.buffer.queue, registry, router)
        self.scheduler = SchedulerHandlers(config, live, dispatcher, dynamic_timeout, router, actor)
        self.trainer = TrainerHandlers(live, router, actor, retention, self.queue.on_trainer_restarted)
        self.batches = BatchHandlers(
            config, live, dispatcher, pipeline, in_hand, outputs, router, actor, dynamic_timeout=dynamic_timeout,
            journals=self.journals,
        )
        self.answers = AnswerHandlers(live, outputs, router, self.batches.run_job)
        self.loads = LoadHandlers(self.fleet, router)
        guardian_of = lambda name: guardian if (fleet := hosts()) is None else fleet.guardian_of(name, guardian)  # noqa: E731
        self.runners = RunnerHandlers(router, registry, guardian_of)
        settings = config.rollout.servers if on_servers else None
        self.servers = ServerFleet(settings, registry, guardian, proxied=config.mode == "serve")
        parts = (
            self.batches, self.scheduler, self.trainer, self.queue, self.loads, self.runners, self.answers, self.routes,
            MachineHandlers(self.servers, hosts, router),
        )
        router.add_handlers([handler_row(GetStatus, self.status), *(row for part in parts for row in part.handlers())])

    def answer_requests(self) -> None:
        """At the end of a turn, answer the requests that its events complete, and read journals of lost units."""
        self.batches.finalize_if_ready([*self.live.turn.batches])
        self.scheduler.answer_polls(self.live.turn.batches)
        if not self.live.ended_batches.keys().isdisjoint(self.live.turn.batches):
            self.live.when_durable(self.trainer.check_next_batch)
            self.queue.serve_requests()
        self.loads.answer_requests()
        self.runners.answer_restarts()
        self.journals.read_lost(self.live.turn.batches)

    def status(self, request: CommandRequest[GetStatus]) -> None:
        """Answer `status` at once and from memory, also while the log can't be written."""
        batches = [
            {
                "batch_id": b.batch_id, "batch_type": b.batch_type, "state": b.state.value,
                "tasks": b.expected_task_count, "settled": b.completed_task_count, "running_units": len(b.flights),
                "pending_units": len(b.pending), "failed_attempts": b.failed_attempts,
                "waited_for": len(self.batches.waiters.get(b.batch_id, [])),
                "must_end": self.batches.has_uncuttable_task(b),
            }
            for b in sorted(self.live.batches.values(), key=lambda b: sort_batch_id(b.batch_id))
        ]
        hosts = self.hosts()
        self.router.answer(
            request,
            {
                "weights_version": self.live.weights.version,
                "adapters": {name: e.version for name, e in current_adapters(self.live.adapters).items()},
                "batches": batches, "runners": self.fleet.registry.status(), "clock": self.fleet.registry.clock(),
                "recovered": self.batches.recovered, "outputs": self.outputs.status(), "queue": self.queue.status(),
                "epoch": self.session.lease.epoch, "trouble": self.session.trouble,
                "refuses": self.session.failure is not None,
                "proxies": self.routes.urls(), "servers": self.servers.status(), "server_list": self.servers.trouble,
                "leases": self.leases.status(), "hosts": [] if hosts is None else hosts.status(),
            },
        )
