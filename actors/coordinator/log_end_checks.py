"""What others know of the log, looked up before anything is done for them.

Clients and runners say with what they send how far they have seen the log (a `Mark`). One that this coordinator told
them itself is right. Any other, from before it started, is looked up, in a thread, while the message waits: where the
log has not what a mark says, it lost what was acknowledged; where the mark lies behind all that this coordinator wrote,
another has taken over. That is one look a client in the life of a coordinator.
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
"""Maximum of marks that were looked up and found."""


class _Look(NamedTuple):
    claim: Claim
    act: Callable[[], None]
    anyway: bool


class Witnesses:
    """Who acts on a message is called at once, or when what its sender knows was found in the log."""

    def __init__(
        self, log: EventLog, told: Iterable[str], post: Callable[[Callable[[], None]], None],
        rewound: Callable[[LogRewound], None], replaced: Callable[[], None],
    ) -> None:
        """`told`: runners that must have spoken first; `post` runs a callable in the actor's loop. `replaced` is called
        where a mark is of a later coordinator.
        """
        self._log, self._post, self._rewound, self._replaced = log, post, rewound, replaced
        self._teller = uuid.uuid4().hex
        self._found: OrderedDict[Mark, None] = OrderedDict()
        self._waiting: list[_Look] = []
        self._looking = False
        self.unheard = set(told)
        """Runners that have not said yet what they know."""
        self._held: list[Callable[[], None]] = []

    def end(self) -> Mark | None:
        """Return the end of the log, as it may be told; None before anything was written."""
        mark = self._log.acknowledged
        return None if mark is None else mark._replace(teller=self._teller)

    # --- marks ------------------------------------------------------------------------------------------------------
    def admit(self, known: Mark | None, by: str, act: Callable[[], None], *, anyway: bool = False) -> None:
        """Call `act` when the log is known to hold what `by` knows. Where it can't be read now: never, or `anyway`."""
        if known is None or known.teller == self._teller or known._replace(teller="") in self._found:
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
            end = self._log.acknowledged  # before the look, which goes on from what it finds
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
        elif error is not None:  # they ask again
            logging.getLogger("trinity_es.witnesses").warning("what others know can't be looked up: %s", error)
            waiting = [look for look in waiting if look.anyway]
        elif later:  # nobody else writes what is told: who asks finds the other
            self._replaced()
            return
        else:
            self._found.update((look.claim.mark, None) for look in waiting)
            while len(self._found) > REMEMBERED_MARKS:
                self._found.popitem(last=False)
        for look in waiting:
            look.act()
        if self._waiting and not self._looking:
            self._look()

    # --- runners first ----------------------------------------------------------------------------------------------
    def after_runners(self, act: Callable[[], None]) -> None:
        """Call `act` when every runner has spoken that may know more than this coordinator found."""
        if self.unheard:
            self._held.append(act)
        else:
            act()

    def heard(self, name: str) -> None:
        """Take note that this runner has said what it knows, or can't any more."""
        self.unheard.discard(name)
        if not self.unheard:
            self.hear_no_more()

    def hear_no_more(self) -> None:
        """Go on without those that have not spoken: a runner may be stopped."""
        self.unheard = set()
        held, self._held = self._held, []
        for act in held:
            act()
