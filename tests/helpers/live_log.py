"""Live state of a coordinator on a real log, without actors. Each turn is written when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.timers import Timers
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors


class LiveLog(Timers):
    """Host of a live state: clock, timers and sent messages of the actor."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.url = f"sqlite:///{folder / 'log.sqlite'}"
        self.log = EventLog.open(self.url, create=True, durability="process", projectors=projectors())
        self.payloads = open_payloads(self.url, durability="process")
        self.live = LiveState(self.log, self.payloads)
        self.clock, self.commits = 0.0, 0
        self.sent: list[tuple[Any, Any]] = []

    def now(self) -> float:
        return self.clock

    def send(self, to: Any, message: Any) -> None:
        self.sent.append((to, message))

    def look(self) -> None:
        """Do the checks that the actor does at the end of a turn."""

    def turn(self) -> Sequence[ev.Event]:
        """End the turn and its follow-up turns, and return the written events."""
        written: list[ev.Event] = []
        self.look()
        while self.live.turn.writes or self.live.turn.durable_calls:
            turn = self.live.close_turn()
            if turn.writes:
                self.commits += 1
                self.log.append(turn.writes, commit_id=str(self.commits))
                written += [event for write in turn.writes for event in write.events]
            for call in turn.durable_calls:
                call()
            self.look()
        return written

    def close(self) -> None:
        self.payloads.close()
        self.log.close()
