"""A host that is to leave, by SIGTERM of its `join`."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_es.actors import messages
from trinity_es.actors.guardian.actor import Guardian
from trinity_es.events.errors import SyncError
from trinity_es.hosts.join import HostRun


def guardian(epoch: int) -> tuple[Any, list[Any], list[str]]:
    sent: list[Any] = []
    ended: list[str] = []
    it = SimpleNamespace(
        config=SimpleNamespace(host="b"), stopping=False, epoch=epoch, coordinator_address="agent",
        send=lambda to, message: sent.append(message), end=ended.append, log=logging.getLogger(__name__))
    return it, sent, ended


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_host_that_no_head_took_in_ends_at_once_and_another_is_to_be_drained(epoch: int) -> None:
    it, sent, ended = guardian(epoch)
    for _ in range(2):
        Guardian.on_HostLeaves(it, messages.HostLeaves("SIGTERM"), None)
    assert bool(ended) == (epoch == 0)
    assert len(sent) == (2 if epoch else 0), "each word goes on: the one before may be lost"


def test_a_pull_is_given_up_when_the_host_leaves(tmp_path: Path) -> None:
    run = HostRun("postgresql://nowhere/run", "b", [], tmp_path, report=lambda text: None)
    run.leave("SIGTERM", 30.0)
    begun = time.monotonic()

    async def pull() -> Path:
        await asyncio.sleep(60.0)
        return tmp_path

    with pytest.raises(SyncError, match="this host is leaving"):
        asyncio.run(run._await_unless_leaving(pull()))
    assert time.monotonic() - begun < 5.0
