"""Handlers of commands about weights and LoRA adapters. Most wait until every runner has carried out an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es.actors.commands import (
    CheckWeightGroup,
    CommandRequest,
    JoinedRunners,
    JoinWeightGroup,
    RemoveAdapter,
    SyncAdapter,
    SyncedAdapter,
    SyncedWeights,
    SyncWeights,
)
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.events import vocabulary as ev

__all__ = ["LoadHandlers"]

LoadRequest = CommandRequest[SyncWeights] | CommandRequest[SyncAdapter] | CommandRequest[JoinWeightGroup]


class LoadHandlers:

    def __init__(self, fleet: RunnerLifecycle, router: CommandRouter) -> None:
        self.weights, self.adapters = fleet.weights, fleet.adapters
        self.actor, self.router = fleet.registry.actor, router
        self._waiting: dict[str, tuple[LoadRequest, Awaited, Callable[[], Any]]] = {}
        """Request id -> request, the wait for its runners, and a function that returns the answer."""

    def handlers(self) -> list[HandlerRow]:
        return [
            handler_row(SyncWeights, self.sync_weights),
            handler_row(CheckWeightGroup, self.check_group),
            handler_row(JoinWeightGroup, self.join_group),
            handler_row(SyncAdapter, self.sync_adapter),
            handler_row(RemoveAdapter, self.remove_adapter),
        ]

    def sync_weights(self, request: CommandRequest[SyncWeights]) -> None:
        """Publish weights, and answer when every runner has them."""
        command = request.command
        awaited, from_group = self.weights.publish(
            command.version, command.path, command.method, again=command.again)

        def answer() -> SyncedWeights:
            runners = self._matching_runners(lambda r: r.model_version == command.version)
            return SyncedWeights(version=command.version, runners=runners, from_group=from_group)

        self._wait(request, awaited, answer)

    def sync_adapter(self, request: CommandRequest[SyncAdapter]) -> None:
        """Publish a version of an adapter, and answer when every runner has it."""
        command = request.command
        awaited = self.adapters.publish(ev.AdapterPublished(
            adapter=command.adapter, version=command.version, path=command.path, rank=command.rank, size=command.size,
            digest=command.digest,
        ))

        def answer() -> SyncedAdapter:
            runners = self._matching_runners(lambda r: r.adapters.get(command.adapter) == command.version)
            return SyncedAdapter(adapter=command.adapter, version=command.version, runners=runners)

        self._wait(request, awaited, answer)

    def remove_adapter(self, request: CommandRequest[RemoveAdapter]) -> None:
        self.adapters.remove(request.command.adapter)
        self.router.reply(request)

    def check_group(self, request: CommandRequest[CheckWeightGroup]) -> None:
        self.router.answer(request, self.weights.group.is_whole())

    def join_group(self, request: CommandRequest[JoinWeightGroup]) -> None:
        """Invite every runner to the trainer's process group, and answer when all have joined."""
        awaited = self.weights.group.join(request.id, request.command)
        joined = JoinedRunners(runners=sorted(awaited.waiting_on))
        for other in [r for r, _, _ in self._waiting.values() if isinstance(r.command, JoinWeightGroup)]:
            self._end_wait(other.id, "another group is being made")
        self._wait(request, awaited, lambda: joined)

    # --- waiting ----------------------------------------------------------------------------------------------------
    def _matching_runners(self, fulfil: Callable[[RunnerRecord], bool]) -> list[str]:
        return sorted(r.name for r in self.weights.registry.rollout_runners() if fulfil(r))

    def _wait(self, request: LoadRequest, awaited: Awaited, answer: Callable[[], Any]) -> None:
        """Answer a request when its runners are done, or with an error after its timeout."""
        timeout = request.command.timeout
        self._waiting[request.id] = request, awaited, answer
        time_out = lambda: self._end_wait(request.id, f"no answer in {timeout} s")  # noqa: E731
        self.actor.after(timeout, f"loads:{request.id}", time_out)

    def answer_requests(self) -> None:
        """At the end of a turn, answer the requests whose runners have all carried out their orders."""
        for request_id, (_, awaited, _) in list(self._waiting.items()):
            if not awaited.waiting_on:
                self._end_wait(request_id)

    def _end_wait(self, request_id: str, timed_out: str = "") -> None:
        """End a wait, and answer its request. `timed_out` is the error for each runner without an answer."""
        request, awaited, answer = self._waiting.pop(request_id)
        self.actor.cancel_timer(f"loads:{request_id}")
        for waiters in (self.weights.waiters, self.adapters.waiters):
            waiters.pop(awaited, None)
        self.router.reply(request, answer(), awaited.error(timed_out))
