"""The engine over HTTP where a server is silent, busy or strange, or its runner ended or is stopped in a change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.http_engines import EIGHT, met, stood_in
from tests.helpers.servers import ended, stand_in
from trinity_es.actors.engines.http import engine as http_engine
from trinity_es.actors.engines.http import vllm_api as vllm_http_api
from trinity_es.actors.engines.http.engine import HTTPEngine
from trinity_es.actors.engines.http.vllm_api import ServerGone, VLLMServer
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.errors import EngineError


async def test_a_server_whose_runner_ended_in_a_change_is_loaded_again(tiny: Path, other: Path, tmp_path: Path) -> None:
    account = tmp_path / "account"
    server = stand_in(tiny, tmp_path / "log", "--account", str(account)).start()
    with ended(server):
        left = VLLMServer(server.ready().url)

        async def leave() -> None:
            await left.pause()
            await left.set_label("trinity-es/changing/of-another-life")
            await left.in_workers("reload_weights", weights_path=str(other))

        await leave()
        async with met(server, tiny) as engine:
            assert (await engine.generate("a", EIGHT))[0].version_spans == ((0, 0, 8),)  # type: ignore[attr-defined]
        await leave()
        with pytest.raises(EngineError, match="exit status 5"):  # who can restart it does
            async with met(server, tiny, restart_command="exit 5"):
                pass
        await left.close()
    made_by = {folder for line in account.read_text().splitlines() for folder in json.loads(line)["weights"]}
    assert made_by == {str(tiny)}


async def test_a_server_that_falls_silent_in_a_change_ends_the_engine(
    tiny: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(vllm_http_api, "STATUS_SECONDS", 0.5)
    monkeypatch.setattr(vllm_http_api, "CONNECT_SECONDS", 0.5)
    async with stood_in(tiny, tmp_path, "--load-seconds", "2") as (server, engine):
        loading = asyncio.create_task(engine.load_weights(1, str(other)))
        await asyncio.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="does not answer") as failed:
            await asyncio.wait_for(loading, 15)
        assert failed.value.details["dead"]


async def test_a_stop_lets_a_change_of_weights_end_and_asks_no_more(tiny: Path, other: Path, tmp_path: Path) -> None:
    async with stood_in(tiny, tmp_path, "--load-seconds", "1") as (server, engine):
        loading = asyncio.create_task(engine.load_weights(1, str(other)))
        await asyncio.sleep(0.3)
        await engine.stop()
        await loading
        assert server.ask("/weight_info")["weight_version"].startswith("trinity-es/1/")
        assert not server.ask("/is_paused")["is_paused"]
        with pytest.raises(ServerGone, match="was closed: its engine was stopped"):
            await engine.server.unhealthy()


async def test_an_answer_that_is_no_json_is_an_engine_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>sign in</html>"))
    server = VLLMServer("http://a:1", transport=transport)
    for call in (server.label, server.is_paused, server.facts, lambda: server.tokenize("a"), server.pause):
        with pytest.raises(EngineError, match="an answer that is not in the format of vLLM: '<html>sign in</html>'"):
            await call()
    await server.close()


async def test_the_watch_outlives_every_error(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stood_in(tiny, tmp_path) as (server, engine):
        looked = asyncio.Event()

        async def strange(self: VLLMServer) -> str:
            looked.set()
            raise LookupError("nobody thought of this")

        with monkeypatch.context() as patched:
            patched.setattr(VLLMServer, "label", strange)
            await asyncio.wait_for(looked.wait(), 10)
        server.kill()
        await asyncio.wait_for(engine._died.wait(), 10)


async def test_a_busy_server_fails_a_request_alone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 3600.0)  # nobody else looks
    async with stood_in(tiny, tmp_path, "--no-scale-out") as (_, engine):
        with monkeypatch.context() as patched:
            patched.setattr(vllm_http_api, "STATUS_SECONDS", 0.0)
            with pytest.raises(EngineError, match="does not answer") as failed:
                await engine.generate("a", EIGHT)
        assert not failed.value.details.get("dead")
        assert engine.dead is None
        assert await engine.generate("a", EIGHT)


async def test_a_start_says_that_it_waits_for_the_restart_command(tiny: Path, other: Path, tmp_path: Path) -> None:
    server = stand_in(other, tmp_path / "log", "--no-dev").start()
    with ended(server):
        options = {"url": server.ready().url, "restart_command": "sleep 1; exit 5"}
        engine = HTTPEngine(EngineConfig(model_path=str(tiny), options=options))
        starting = asyncio.create_task(engine.start())
        until = time.monotonic() + 10
        while not engine.waits_for and not starting.done() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert engine.waits_for == f"the restart command of {engine.server.url}"
        with pytest.raises(EngineError, match="exit status 5"):
            await starting
        assert not engine.waits_for
