"""Loop of a thread that reads a log while its run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trinity_es.events.errors import LogNotFound, LogReplaced, NotALog
from trinity_es.projections.reading.log_reader import Log, open_log

__all__ = ["read_repeatedly"]


def read_repeatedly(
    url: str, look: Callable[[Log], None], stop: threading.Event, seconds: float, complain: Callable[[Exception], None]
) -> None:
    """Call `look` with the log at `url` every `seconds` until `stop` is set, and once more after that.

    Waits for a log that does not exist yet or was replaced. Reports any other error to `complain` and tries again.
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
        except Exception as e:  # for example, the database is unreachable
            complain(e)
        if last:
            return
        last = stop.wait(seconds)
