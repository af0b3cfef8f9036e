"""Every event of the log.

Events are frozen dataclasses of plain JSON values. A class whose fields change gets a new `schema_version`, with an
upcaster in `codec.py`. docs/EVENTS.md is made from the docstrings of classes and fields.
"""

from __future__ import annotations

from trinity_es.events.vocabulary import base, batch_events, delivery_events, host_events, lease_events, system_events
from trinity_es.events.vocabulary.base import *  # noqa: F403  # each of the six lists its exports
from trinity_es.events.vocabulary.batch_events import *  # noqa: F403
from trinity_es.events.vocabulary.delivery_events import *  # noqa: F403
from trinity_es.events.vocabulary.host_events import *  # noqa: F403
from trinity_es.events.vocabulary.lease_events import *  # noqa: F403
from trinity_es.events.vocabulary.system_events import *  # noqa: F403

__all__ = ["EVENTS", "RUNNER_LIFE"]
__all__ += base.__all__
__all__ += batch_events.__all__
__all__ += delivery_events.__all__
__all__ += host_events.__all__
__all__ += lease_events.__all__
__all__ += system_events.__all__

EVENTS: dict[str, type[base.Event]] = {
    name: cls
    for name, cls in list(globals().items())
    if isinstance(cls, type) and issubclass(cls, base.Event) and cls is not base.Event
}
"""Every event by its name in the log."""

RUNNER_LIFE = ("RunnerStarted", "RunnerReady", "RunnerFailed", "RunnerLost", "RunnerQuarantined", "RunnerRetired")
"""Events that begin or end an incarnation of a runner, which is one life of its process."""
