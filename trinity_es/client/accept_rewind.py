"""Recording of an operator's decision to go on with a log that lost events (`trinity-es accept-rewind`)."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from dataclasses import asdict
from typing import Any

from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.store.checks.log_end import acceptance
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.tables.read_models import projectors
from trinity_es.system.remembered_log_end import memory, rewind_message

__all__ = ["accept"]


def accept(config: Config, reason: str) -> dict[str, Any] | None:
    """Record in the log that its operator accepts the loss of events. Returns the record, or None if no event is lost.

    An event is lost if this host remembers it and the log lacks it. A system that runs on the store is ended first,
    because its processes hold state of the lost events. Raises the errors of EventLog.open.
    """
    if rewind_message(config) is None:
        return None
    end_system(config)
    url = config.store.url
    with EventLog.open(url, create=True, durability=config.store.durability, projectors=projectors()) as log:
        person = f"{getpass.getuser()} on {socket.gethostname()}"
        lease = log.acquire_lease("coordinator", {"pid": os.getpid(), "host": socket.gethostname()})
        own_memory = memory(config)
        head, lost_claims = log.lost_claims(log.remembered_claims(own_memory))
        if not lost_claims:
            return None
        generation = uuid.uuid4().hex
        event = acceptance(head, lost_claims, generation, person, reason)
        write = Write(stream="system", expected_version=log.stream_version("system"), events=[event])
        appended = log.append([write], commit_id=f"accept-rewind:{generation}", lease=lease, generation=generation)
        log.release_lease(lease)
        assert log.acknowledged is not None
        own_memory.keep_only(log.acknowledged)
    return {"position": appended.first_position, **asdict(event)}
