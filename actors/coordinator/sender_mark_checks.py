"""Checks of senders' marks against the log, before the coordinator acts on their messages.

Each message carries a `Mark`: how far its sender has seen the log. The coordinator trusts marks of its own. It checks
any other mark in a thread, while the message waits. If the log does not hold the marked event, it lost acknowledged
events. If the mark lies behind the end of the log as this coordinator wrote it, another coordinator has taken over.
Each client costs one check in the life of a coordinator.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trinity_es.events.errors import LogRewound
from trinity_es.events.store.checks.log_end import Claim, Mark
from trinity_es.events.store.log import EventLog

__all__ = ["Witnesses"]

REMEMBERED_MARKS = 1000
"""Maximum number of verified marks kept."""


class _Check(NamedTuple):
    claim: Claim
    act: Callable[[], None]
    if_unreadable: bool


class Witnesses:
    """Marks of senders, and the messages that wait until these are checked."""

    def __init__(
        self, log: EventLog, unheard: Iterable[str], post: Callable[[Callable[[], None]], None],
        rewound: Callable[[LogRewound], None], replaced: Callable[[], None],
    ) -> None:
        """Hold client requests until the `unheard` runners have reported.

        `post` runs a callable in the actor's loop. `replaced` is called for a mark of a later coordinator.
        """
        self._log, self._post, self._rewound, self._replaced = log, post, rewound, replaced
        self._teller = uuid.uuid4().hex
        self._verified: OrderedDict[Mark, None] = OrderedDict()
        self._waiting: list[_Check] = []
        self._checking = False
        self.unheard = set(unheard)
        """Runners that have not yet sent their mark."""
        self._held: list[Callable[[], None]] = []

    def end(self) -> Mark | None:
        """Return the mark of the last acknowledged event; None before the first."""
        mark = self._log.acknowledged
        return None if mark is None else mark._replace(teller=self._teller)

    # --- marks ------------------------------------------------------------------------------------------------------
    def admit(self, mark: Mark | None, by: str, act: Callable[[], None], *, if_unreadable: bool = False) -> None:
        """Call `act` once the log has proved to hold the mark that the sender `by` has.

        If the log can't be read, only calls with `if_unreadable` are made; the other senders repeat their messages.
        """
        if mark is None or mark.teller == self._teller or mark._replace(teller="") in self._verified:
            act()
            return
        self._waiting.append(_Check(Claim(mark._replace(teller=""), by), act, if_unreadable))
        if not self._checking:
            self._start_check()

    def _start_check(self) -> None:
        self._checking = True
        checks, self._waiting = self._waiting, []

        def run() -> None:
            error: Exception | None = None
            acknowledged = self._log.acknowledged  # before the check, which may move it
            has_later_mark = acknowledged is not None and any(
                check.claim.mark.position > acknowledged.position for check in checks
            )
            try:
                self._log.require([check.claim for check in checks])
            except Exception as e:
                error = e
            self._post(lambda: self._end_check(checks, error, has_later_mark))

        threading.Thread(target=run, name="mark-check", daemon=True).start()

    def _end_check(self, checks: list[_Check], error: Exception | None, has_later_mark: bool) -> None:
        self._checking = False
        if isinstance(error, LogRewound):
            self._rewound(error)
        elif error is not None:  # the clients ask again
            logging.getLogger("trinity_es.witnesses").warning("senders' marks of the log can't be checked: %s", error)
            checks = [check for check in checks if check.if_unreadable]
        elif has_later_mark:  # only the next coordinator can have written more; clients will find it
            self._replaced()
            return
        else:
            self._verified.update((check.claim.mark, None) for check in checks)
            while len(self._verified) > REMEMBERED_MARKS:
                self._verified.popitem(last=False)
        for check in checks:
            check.act()
        if self._waiting and not self._checking:
            self._start_check()

    # --- runners first ----------------------------------------------------------------------------------------------
    def after_runners(self, act: Callable[[], None]) -> None:
        """Call `act` once every runner that may have seen more of the log has reported."""
        if self.unheard:
            self._held.append(act)
        else:
            act()

    def heard(self, name: str) -> None:
        """Note that a runner has sent its mark, or never will."""
        self.unheard.discard(name)
        if not self.unheard:
            self.hear_no_more()

    def hear_no_more(self) -> None:
        """Go on without the runners that have not reported, since one may be suspended."""
        self.unheard = set()
        held, self._held = self._held, []
        for act in held:
            act()
