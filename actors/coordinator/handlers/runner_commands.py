"""Handlers of clients' commands about runners: restarts and states.

The coordinator repeats a restart request to the guardian until the runner's next process has begun. The request names
the incarnation to end, so repetitions end no other. If several clients ask for the state of a runner, the coordinator
asks the runner once. Without an answer within `ANSWER_SECONDS` they get the state that the coordinator has.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from trinity_es.actors import commands
from trinity_es.actors.commands import CommandRequest, GetRunnerStates, RestartedRunner
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.messages import QueryActivity, ReplaceRunner, RunnerActivity
from trinity_es.actors.runner_activity import runner_state, states_table
from trinity_es.events.errors import RunnerNotFound
from trinity_es.projections.runner import RunnerState, newest_life

__all__ = ["RunnerHandlers"]

ANSWER_SECONDS = 1.0
"""Time limit for runners to report their state."""
REPEAT_SECONDS = 2.0
"""Interval between two requests to the guardian."""
SILENT_SECONDS = 20.0
"""Time after which an unanswered question to a runner counts as lost, so that it may be asked again."""

States = dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Question:
    """Question to runners about their states."""

    names: list[str]
    silent_names: set[str]
    """Names of the runners whose answers are missing."""
    done: Callable[[States], None]
    answers: States = field(default_factory=dict)


class RunnerHandlers:

    def __init__(self, router: CommandRouter, registry: RunnerRegistry, guardian_of: Callable[[str], Any]) -> None:
        self.router, self.registry, self.actor, self.guardian_of = router, registry, registry.actor, guardian_of
        self._questions: dict[str, _Question] = {}
        """Open questions by id."""
        self._asked_at: dict[tuple[str, int], float] = {}
        """(runner, incarnation) -> monotonic seconds of an unanswered QueryActivity."""
        self._restarts: dict[str, tuple[CommandRequest[commands.RestartRunner], ReplaceRunner]] = {}
        """Request id -> request for a restart, with the order for the guardian."""

    def handlers(self) -> list[HandlerRow]:
        return [handler_row(commands.RestartRunner, self.restart), handler_row(GetRunnerStates, self.states)]

    # --- restarts ---------------------------------------------------------------------------------------------------
    def restart(self, request: CommandRequest[commands.RestartRunner]) -> None:
        """End a runner's process, and answer when its next process has begun. Raises RunnerNotFound."""
        name, incarnation = request.command.runner, request.command.incarnation
        if name not in self.registry.runners and newest_life(self.registry.live.lives, name) is None:
            raise RunnerNotFound(f"there is no runner {name!r}; runners: {', '.join(sorted(self.registry.runners))}")
        self._restarts[request.id] = request, ReplaceRunner(name, incarnation, request.command.reason)
        self.answer_restarts()
        self._ask_guardian(request.id)

    def _ask_guardian(self, request_id: str) -> None:
        """Send the order for a restart to the runner's guardian, and repeat it until the next process has begun."""
        if request_id in self._restarts:
            _, order = self._restarts[request_id]
            self.actor.send(self.guardian_of(order.name), order)
            self.actor.after(REPEAT_SECONDS, f"restart:{request_id}", lambda: self._ask_guardian(request_id))

    def answer_restarts(self) -> None:
        """Answer the requests for a restart whose runner has a new process."""
        for request, guardian_order in list(self._restarts.values()):
            runner = self.registry.runners.get(guardian_order.name)
            if runner is not None and runner.incarnation > guardian_order.incarnation:
                del self._restarts[request.id]
                self.actor.cancel_timer(f"restart:{request.id}")
                self.router.reply(request, RestartedRunner(runner=guardian_order.name, incarnation=runner.incarnation))

    # --- states -----------------------------------------------------------------------------------------------------
    def states(self, request: CommandRequest[GetRunnerStates]) -> None:
        """Answer with the states of the named runners, or of all. Unknown names are left out."""
        names = request.command.names
        runners = [n for n in sorted(self.registry.runners) if names is None or n in names]
        self.ask(runners, lambda states: self.router.answer(request, states))

    def ask(self, names: Iterable[str], done: Callable[[States], None]) -> None:
        """Ask runners for their states, and call `done` with them after `ANSWER_SECONDS` at the latest. If a runner has
        an unanswered question, it gets no second one: its answer counts for both."""
        question_id = uuid.uuid4().hex
        question = _Question(list(names), set(), done)
        for name in question.names:
            runner = self.registry.runners[name]
            if runner.address is not None and not runner.state.gone and runner.state is not RunnerState.RETIRED:
                question.silent_names.add(name)
                life = name, runner.incarnation
                if self.actor.now() - self._asked_at.get(life, -SILENT_SECONDS) >= SILENT_SECONDS:
                    self._asked_at[life] = self.actor.now()
                    self.actor.send(runner.address, QueryActivity(runner.incarnation))
        self._questions[question_id] = question
        if question.silent_names:
            self.actor.after(ANSWER_SECONDS, f"states:{question_id}", lambda: self._finish_question(question_id))
        else:
            self._finish_question(question_id)

    def on_activity(self, message: RunnerActivity) -> None:
        """Add a runner's state to all questions that wait for it."""
        self._asked_at.pop((message.name, message.incarnation), None)
        for question_id, question in list(self._questions.items()):
            if message.name in question.silent_names:
                question.silent_names.discard(message.name)
                question.answers[message.name] = message.state
                if not question.silent_names:
                    self.actor.cancel_timer(f"states:{question_id}")
                    self._finish_question(question_id)

    def _finish_question(self, question_id: str) -> None:
        """Call a question's `done` with the state of each runner: its answer, or the recorded state if it gave none."""
        question = self._questions.pop(question_id)
        known_names = question.answers.keys() | self.registry.runners.keys()  # after a reload runners are missing
        names = [n for n in question.names if n in known_names]
        question.done({name: question.answers.get(name) or self._recorded_state(name) for name in names})

    def _recorded_state(self, name: str) -> dict[str, Any]:
        """Return a runner's state from the coordinator's records, as plain JSON."""
        runner = self.registry.runners[name]
        units = self.registry.live.in_flight.loads.get((name, runner.incarnation), 0)
        return runner_state(
            None, runner=name, incarnation=runner.incarnation, model=runner.life.model, state=runner.state,
            model_version=runner.model_version, units=units,
        )

    def report(self, interval: float, write: Callable[[str], None]) -> None:
        """Call `write` with a table of all runners' activity, every `interval` seconds."""
        self.actor.after(interval, "runner states", lambda: self.report(interval, write))
        self.ask(sorted(self.registry.runners), lambda states: write(states_table(states)))
