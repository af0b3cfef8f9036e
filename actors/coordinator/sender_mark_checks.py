"""Checks of senders' marks against the log, before the coordinator acts on their messages.

Each message carries a `Mark`, the last event of the log that its sender has heard of. The coordinator trusts marks of
its own. It checks any other mark in a thread, while the message waits. If the log does not hold the marked event, it
lost acknowledged events. If that event comes after the last one that this coordinator wrote, another coordinator has
taken over. A coordinator checks each client once.
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

__all__ = ["SenderMarkChecks"]

REMEMBERED_MARKS = 1000
"""Maximum number of verified marks kept."""


class _Check(NamedTuple):
    """Check of a sender's mark, and the handling of its message."""

    claim: Claim
    """The mark, and the name of its sender."""
    act: Callable[[], None]
    if_unreadable: bool
    """True if the message is handled even if the log can't be read."""


class SenderMarkChecks:
    def __init__(
        self, log: EventLog, unheard_runners: Iterable[str], post: Callable[[Callable[[], None]], None],
        on_rewound: Callable[[LogRewound], None], on_replaced: Callable[[], None],
    ) -> None:
        """Hold client requests until the `unheard_runners` have reported. `post` runs a callable in the actor's loop.
        `on_rewound` is called if the log lacks a marked event, `on_replaced` for a mark of a later coordinator."""
        self._log, self._post, self._on_rewound, self._on_replaced = log, post, on_rewound, on_replaced
        self._teller = uuid.uuid4().hex
        """Id of this coordinator in its own marks."""
        self._verified_marks: OrderedDict[Mark, None] = OrderedDict()
        self._waiting_checks: list[_Check] = []
        self._is_checking = False
        self.unheard_runners = set(unheard_runners)
        """Runners that have not yet sent their mark."""
        self._requests_after_runners: list[Callable[[], None]] = []
        """Calls that handle clients' requests once all runners have sent their marks."""

    def log_end(self) -> Mark | None:
        """Return the mark of the last acknowledged event; None before the first."""
        mark = self._log.acknowledged
        return None if mark is None else mark._replace(teller=self._teller)

    # --- marks ------------------------------------------------------------------------------------------------------
    def admit(
        self, mark: Mark | None, sender_name: str, act: Callable[[], None], *, if_unreadable: bool = False
    ) -> None:
        """Call `act` once the log was found to hold the marked event, at once if that was checked before. If the log
        can't be read, `act` is called only with `if_unreadable`; other senders repeat their messages."""
        if mark is None or mark.teller == self._teller or mark._replace(teller="") in self._verified_marks:
            act()
            return
        self._waiting_checks.append(_Check(Claim(mark._replace(teller=""), sender_name), act, if_unreadable))
        if not self._is_checking:
            self._start_checks()

    def _start_checks(self) -> None:
        self._is_checking = True
        checks, self._waiting_checks = self._waiting_checks, []

        def check_in_thread() -> None:
            """Look for the marked events in the log, and have the actor's loop handle the result."""
            error: Exception | None = None
            last_written = self._log.acknowledged  # before the check, which may move it
            has_later_mark = last_written is not None and any(
                check.claim.mark.position > last_written.position for check in checks
            )
            try:
                self._log.require([check.claim for check in checks])
            except Exception as e:
                error = e
            self._post(lambda: self._end_checks(checks, error, has_later_mark))

        threading.Thread(target=check_in_thread, name="mark-check", daemon=True).start()

    def _end_checks(self, checks: list[_Check], error: Exception | None, has_later_mark: bool) -> None:
        """Handle the messages whose marks were checked, and start the checks that came meanwhile.

        `error` is the thread's error. `has_later_mark` means that a marked event comes after the last one that this
        coordinator wrote; then the messages stay unhandled.
        """
        self._is_checking = False
        if isinstance(error, LogRewound):
            self._on_rewound(error)
        elif error is not None:  # the clients ask again
            logging.getLogger("trinity_es.marks").warning("senders' marks of the log can't be checked: %s", error)
            checks = [check for check in checks if check.if_unreadable]
        elif has_later_mark:  # only the next coordinator can have written more; clients will find it
            self._on_replaced()
            return
        else:
            self._verified_marks.update((check.claim.mark, None) for check in checks)
            while len(self._verified_marks) > REMEMBERED_MARKS:
                self._verified_marks.popitem(last=False)
        for check in checks:
            check.act()
        if self._waiting_checks and not self._is_checking:
            self._start_checks()

    # --- runners first ----------------------------------------------------------------------------------------------
    def after_runners(self, act: Callable[[], None]) -> None:
        """Call `act` once every runner that may have seen more of the log has reported."""
        if self.unheard_runners:
            self._requests_after_runners.append(act)
        else:
            act()

    def note_runner(self, name: str) -> None:
        """Stop waiting for a runner's mark, which came or never will. After the last one handle clients' requests."""
        self.unheard_runners.discard(name)
        if not self.unheard_runners:
            self.stop_waiting_for_runners()

    def stop_waiting_for_runners(self) -> None:
        """Go on without the silent runners, since one may be suspended."""
        self.unheard_runners = set()
        acts, self._requests_after_runners = self._requests_after_runners, []
        for act in acts:
            act()
