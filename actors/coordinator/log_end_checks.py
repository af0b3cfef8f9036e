"""Checks of what clients and runners know of the log, before the coordinator acts on their messages.

Each message carries a `Mark`: how far its sender has seen the log. A mark from this coordinator itself is right. Any
other mark is older than this coordinator, so a thread checks it while the message waits. If the log does not have what
the mark says, the log lost what was acknowledged. If the mark lies behind all that this coordinator wrote, another
coordinator has taken over. Each client costs one check in the life of a coordinator.
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


class _Look(NamedTuple):
    claim: Claim
    act: Callable[[], None]
    anyway: bool


class Witnesses:
    """Marks of senders, and the messages that wait for their check."""

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
        self._waiting: list[_Look] = []
        self._looking = False
        self.unheard = set(unheard)
        """Runners that have not yet reported what they know of the log."""
        self._held: list[Callable[[], None]] = []

    def end(self) -> Mark | None:
        """Return the end of the log as others may hear it; None before anything was written."""
        mark = self._log.acknowledged
        return None if mark is None else mark._replace(teller=self._teller)

    # --- marks ------------------------------------------------------------------------------------------------------
    def admit(self, known: Mark | None, by: str, act: Callable[[], None], *, anyway: bool = False) -> None:
        """Call `act` once the log is known to hold what `by` knows; if it can't be read, only with `anyway`."""
        if known is None or known.teller == self._teller or known._replace(teller="") in self._verified:
            act()
            return
        self._waiting.append(_Look(Claim(known._replace(teller=""), by), act, anyway))
        if not self._looking:
            self._look()

    def _look(self) -> None:
        self._looking = True
        waiting, self._waiting = self._waiting, []

        def look() -> None:
            error: Exception | None = None
            end = self._log.acknowledged  # before the check, which may move it
            later = end is not None and any(look.claim.mark.position > end.position for look in waiting)
            try:
                self._log.require([look.claim for look in waiting])
            except Exception as e:
                error = e
            self._post(lambda: self._looked(waiting, error, later))

        threading.Thread(target=look, name="look-up", daemon=True).start()

    def _looked(self, waiting: list[_Look], error: Exception | None, later: bool) -> None:
        self._looking = False
        if isinstance(error, LogRewound):
            self._rewound(error)
        elif error is not None:  # the clients ask again
            logging.getLogger("trinity_es.witnesses").warning("what others know of the log can't be checked: %s", error)
            waiting = [look for look in waiting if look.anyway]
        elif later:  # the mark is of the next coordinator, which clients will find
            self._replaced()
            return
        else:
            self._verified.update((look.claim.mark, None) for look in waiting)
            while len(self._verified) > REMEMBERED_MARKS:
                self._verified.popitem(last=False)
        for look in waiting:
            look.act()
        if self._waiting and not self._looking:
            self._look()

    # --- runners first ----------------------------------------------------------------------------------------------
    def after_runners(self, act: Callable[[], None]) -> None:
        """Call `act` once every runner that may know more of the log has reported."""
        if self.unheard:
            self._held.append(act)
        else:
            act()

    def heard(self, name: str) -> None:
        """Note that a runner has reported what it knows, or never will."""
        self.unheard.discard(name)
        if not self.unheard:
            self.hear_no_more()

    def hear_no_more(self) -> None:
        """Go on without the runners that have not reported, since one may be suspended."""
        self.unheard = set()
        held, self._held = self._held, []
        for act in held:
            act()
