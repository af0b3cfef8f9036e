"""What clients ask of the runners themselves.

A restart is asked of the guardian, again and again until another life has begun: the request names the life that is to
end, so however often it comes, one ends. A state is asked of each runner that has a process, by one question however
many want to know; who does not answer within `ANSWER_SECONDS` is told as the coordinator knows it, and is not asked
again for a while. Nothing here waits in a handler.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from trinity_es.actors import commands
from trinity_es.actors.commands import CommandRequest, GetRunnerStates, RestartedRunner
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder, TimerHost
from trinity_es.actors.messages import QueryActivity, ReplaceRunner, RunnerActivity
from trinity_es.actors.run_activity import runner_state, table
from trinity_es.events.errors import RunnerNotFound
from trinity_es.projections.runner import RunnerState, newest_life

__all__ = ["RunnerHandlers"]

ANSWER_SECONDS = 1.0
"""How long runners may take to answer what they do."""
AGAIN_SECONDS = 2.0
"""Interval between two questions to the guardian."""
SILENT_SECONDS = 20.0
"""How long a runner that has not answered is not asked again. What was sent to it is lost by then, if it was."""

States = dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Question:
    """Runners were asked; who has not answered, and whom to tell."""

    names: list[str]
    waiting: set[str]
    done: Callable[[States], None]
    answers: States = field(default_factory=dict)


class RunnerHandlers:
    """Handles what is asked of runners."""

    def __init__(
        self, router: Responder, registry: RunnerRegistry, actor: TimerHost, guardian_of: Callable[[str], Any]
    ) -> None:
        """`guardian_of`: a runner's guardian."""
        self.router, self.registry, self.actor, self.guardian_of = router, registry, actor, guardian_of
        self._questions: dict[str, _Question] = {}
        self._asked: dict[tuple[str, int], float] = {}
        """Lives of runners that have not answered yet, and when each was asked."""
        self._restarts: dict[str, tuple[CommandRequest[commands.RestartRunner], ReplaceRunner]] = {}

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(commands.RestartRunner, self.restart), handled(GetRunnerStates, self.states)]

    # --- restarts ---------------------------------------------------------------------------------------------------
    def restart(self, request: CommandRequest[commands.RestartRunner]) -> None:
        """End a life of a runner; answered when another one has begun."""
        name, incarnation = request.command.runner, request.command.incarnation
        if name not in self.registry.runners and newest_life(self.registry.live.lives, name) is None:
            raise RunnerNotFound(f"there is no runner {name!r}: there are {', '.join(sorted(self.registry.runners))}")
        self._restarts[request.id] = request, ReplaceRunner(name, incarnation, request.command.reason)
        self.check_restarts()
        self._ask_guardian(request.id)

    def _ask_guardian(self, request_id: str) -> None:
        if request_id in self._restarts:
            wanted = self._restarts[request_id][1]
            self.actor.send(self.guardian_of(wanted.name), wanted)
            self.actor.after(AGAIN_SECONDS, f"restart:{request_id}", lambda: self._ask_guardian(request_id))

    def check_restarts(self) -> None:
        """Answer those whose runner lives again."""
        for request, wanted in list(self._restarts.values()):
            known = self.registry.runners.get(wanted.name)
            if known is not None and known.incarnation > wanted.incarnation:
                del self._restarts[request.id]
                self.actor.cancel(f"restart:{request.id}")
                self.router.reply(request, RestartedRunner(runner=wanted.name, incarnation=known.incarnation))

    # --- states -----------------------------------------------------------------------------------------------------
    def states(self, request: CommandRequest[GetRunnerStates]) -> None:
        """Tell what the runners in `names` do, or all; names that nobody has are left out."""
        names = request.command.names
        known = sorted(self.registry.runners)
        wanted = known if names is None else [n for n in known if n in names]
        self.ask(wanted, lambda states: self.router.answer(request, states))

    def ask(self, names: Iterable[str], done: Callable[[States], None]) -> None:
        """Ask runners what they do; `done` is called with their states, in time whoever answers."""
        number = uuid.uuid4().hex
        question = _Question(list(names), set(), done)
        for name in question.names:
            runner = self.registry.runners[name]
            if runner.address is not None and not runner.state.gone and runner.state is not RunnerState.RETIRED:
                question.waiting.add(name)
                life = name, runner.incarnation
                if self.actor.now() - self._asked.get(life, -SILENT_SECONDS) >= SILENT_SECONDS:
                    self._asked[life] = self.actor.now()
                    self.actor.send(runner.address, QueryActivity(runner.incarnation))
        self._questions[number] = question
        if question.waiting:
            self.actor.after(ANSWER_SECONDS, f"states:{number}", lambda: self._over(number))
        else:
            self._over(number)

    def on_activity(self, message: RunnerActivity) -> None:
        """Answer all who wait for this runner."""
        self._asked.pop((message.name, message.incarnation), None)
        for number, question in list(self._questions.items()):
            if message.name in question.waiting:
                question.waiting.discard(message.name)
                question.answers[message.name] = message.state
                if not question.waiting:
                    self.actor.cancel(f"states:{number}")
                    self._over(number)

    def _over(self, number: str) -> None:
        question = self._questions.pop(number)
        there = question.answers.keys() | self.registry.runners.keys()  # a reload forgets them
        known = [n for n in question.names if n in there]
        question.done({name: question.answers.get(name) or self._as_known(name) for name in known})

    def _as_known(self, name: str) -> dict[str, Any]:
        """Return what the coordinator knows of a runner that says nothing itself."""
        r = self.registry.runners[name]
        load = self.registry.live.in_flight.loads
        return runner_state(
            None, runner=name, incarnation=r.incarnation, model=r.life.model, state=r.state,
            model_version=r.model_version, units=load.get((name, r.incarnation), 0),
        )

    def report(self, interval: float, write: Callable[[str], None]) -> None:
        """Write a table of what all runners do, every `interval` seconds."""
        self.actor.after(interval, "runner states", lambda: self.report(interval, write))
        self.ask(sorted(self.registry.runners), lambda states: write(table(states)))
