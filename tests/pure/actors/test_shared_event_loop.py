"""The loop that a runner lives on: what one unit waits for holds up no other."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
from typing import Any

import pytest

from trinity_es.actors.rollout.shared_event_loop import UNIT, WORKFLOW_THREADS, EngineLoop, mark_as_runner, unit_context


def of_unit(name: str) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(UNIT.set, name)
    return context.run(unit_context)


def test_names_that_one_unit_looks_up_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, real = threading.Event(), socket.getaddrinfo

    def lookup(host: Any, *args: Any, **how: Any) -> Any:
        assert host != "slow" or answered.wait(20)
        return real("127.0.0.1", *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def looked_up(host: str) -> None:
        assert (await asyncio.get_running_loop().getaddrinfo(host, 80, type=socket.SOCK_STREAM))[0][4][1] == 80

    def play() -> None:
        mark_as_runner()
        loop = EngineLoop(2)

        async def main() -> None:
            slow = [loop.create_task(looked_up("slow"), context=of_unit("a")) for _ in range(2 * WORKFLOW_THREADS)]
            await asyncio.wait_for(loop.create_task(looked_up("quick"), context=of_unit("b")), 10)
            await asyncio.wait_for(looked_up("quick"), 10)  # the runner's own
            answered.set()
            await asyncio.gather(*slow)
            for unit in ("a", "b"):
                loop.forget(unit)

        playing = loop.create_task(main())
        playing.add_done_callback(lambda _: super(EngineLoop, loop).stop())  # its own refuses
        try:
            loop.run_forever()
        finally:
            answered.set()
            loop.close()
        playing.result()

    contextvars.copy_context().run(play)
