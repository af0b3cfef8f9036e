"""The one loop of those who read a log beside its run, in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trinity_es.events.errors import LogNotFound, LogReplaced, NotALog
from trinity_es.projections.reading.log_reader import Log, open_log

__all__ = ["look_again"]


def look_again(
    url: str, look: Callable[[Log], None], stop: threading.Event, seconds: float, complain: Callable[[Exception], None]
) -> None:
    """Call `look` with the log at `url` every so many seconds until `stop` is set, and once more then.

    A log that is still to be made, or was replaced, is waited for; what else goes wrong is told and tried again.
    """
    last = False
    while True:
        try:
            with open_log(url) as log:
                while True:
                    look(log)
                    if last:
                        return
                    last = stop.wait(seconds)
        except (LogNotFound, LogReplaced, NotALog):
            pass
        except Exception as e:  # the database is away, say
            complain(e)
        if last:
            return
        last = stop.wait(seconds)
