"""The engine over HTTP, against stand-ins of vLLM's server that are as strict as it is: fencing, weights, sampling."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.http_engines import EIGHT, met, stood_in
from tests.helpers.paths import ROOT
from tests.helpers.servers import ServerProcess, ended, stand_in
from trinity_es.actors.engines.http import engine as http_engine
from trinity_es.actors.engines.http import weights as http_weights
from trinity_es.actors.engines.http.engine import HTTPEngine
from trinity_es.actors.engines.http.vllm_api import ServerGone, VLLMServer
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.runner.adaptive_places import START, Places
from trinity_es.events.errors import EngineError, SyncError

NO_WATCH = 3600.0
ROUTES = pytest.mark.parametrize(
    "arguments", [(), ("--no-scale-out",), ("--no-dev",)], ids=["spans", "labels", "plain"]
)
"""Each way in which an answer is known to be of the server that was met."""


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the server between two requests: what fences is what each answer proves."""
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", NO_WATCH)


@ROUTES
async def test_tokens_in_tokens_out(tiny: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    async with stood_in(tiny, tmp_path, *arguments) as (_, engine):
        made = await engine.generate([5, 6, 7], Sampling(n=3, max_tokens=6, seed=1, top_logprobs=2))
        assert len(made) == 3
        for one in made:
            assert one.prompt_token_ids == [5, 6, 7]
            assert len(one.token_ids) == len(one.logprobs or []) == len(one.top_logprobs or []) == 6
            assert one.version_spans == ((0, 0, 6),)  # type: ignore[attr-defined]
            assert one.text == engine.tokenizer.decode(one.token_ids)
        assert len({tuple(one.token_ids) for one in made}) == 3
        pieces = [piece async for piece in engine.stream([5, 6, 7], Sampling(max_tokens=6, seed=1))]
        assert [t for piece in pieces for t in piece.token_ids] == made[0].token_ids
        assert "".join(piece.text for piece in pieces) == made[0].text
        assert [bool(piece.finish_reason) for piece in pieces] == [False] * 5 + [True]
        greedy = await engine.generate("a", Sampling(n=2, temperature=0.0, max_tokens=2, seed=1))
        assert greedy[0].token_ids == greedy[1].token_ids
        assert len(await engine.logprobs([5, 6, 7])) == 2
        long = await engine.generate([5] * 60, Sampling(max_tokens=100))
        assert len(long[0].token_ids) == 4, "the model's room, not a refusal"
        with pytest.raises(EngineError, match="leaves no room") as refused:
            await engine.generate([5] * 64, EIGHT)
        assert refused.value.details["refused"]


@ROUTES
async def test_an_answer_of_a_server_that_restarted_in_between_is_refused(
    tiny: Path, tmp_path: Path, arguments: tuple[str, ...], unwatched: None
) -> None:
    account = tmp_path / "account"
    async with stood_in(tiny, tmp_path, "--account", str(account), *arguments) as (server, engine):
        await engine.generate("a", EIGHT)
        before = len(account.read_text().splitlines())
        server.kill()
        server.start().ready()
        with pytest.raises(EngineError, match=r"restarted|did not give it") as refused:
            await engine.generate("a", EIGHT)
        assert refused.value.details["dead"]
        assert len(account.read_text().splitlines()) == before + 1, "it did answer"
        assert engine.dead


async def test_an_answer_begun_before_the_restart_is_refused(tiny: Path, tmp_path: Path, unwatched: None) -> None:
    async with stood_in(tiny, tmp_path, "--token-seconds", "0.2") as (server, engine):
        asked = asyncio.create_task(engine.generate("a", EIGHT))
        await asyncio.sleep(0.5)
        server.kill()
        with pytest.raises(EngineError) as refused:
            await asked
        assert refused.value.details["dead"]


async def test_a_server_that_ends_is_noticed_and_nobody_waits_for_it(tiny: Path, tmp_path: Path) -> None:
    async with stood_in(tiny, tmp_path, "--latency", "0") as (server, engine):
        server.kill()
        await asyncio.wait_for(engine._died.wait(), 10)
        assert "does not answer" in str(engine.dead)
        with pytest.raises(EngineError):
            await engine.generate("a", EIGHT)


async def test_weights_that_somebody_else_loads_end_the_engine(tiny: Path, other: Path, tmp_path: Path) -> None:
    server = stand_in(tiny, tmp_path / "log").start()
    with ended(server):
        async with met(server.ready(), tiny) as first, met(server, tiny) as second:
            await asyncio.wait_for(first._died.wait(), 10)
            assert "something else" in str(first.dead)
            assert second.dead is None


@pytest.mark.parametrize("arguments", [(), ("--no-scale-out",)], ids=["spans", "labels"])
async def test_weights_change_midway(tiny: Path, other: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    account = tmp_path / "account"
    slow = ("--token-seconds", "0.05", "--account", str(account))
    async with stood_in(tiny, tmp_path, *slow, *arguments) as (_, engine):
        asked = [asyncio.create_task(engine.generate("a", Sampling(max_tokens=20))) for _ in range(4)]
        await asyncio.sleep(0.4)
        await engine.load_weights(1, str(other))
        spans = [(await task)[0].version_spans for task in asked]  # type: ignore[attr-defined]
        if arguments:  # who can't say which weights made a token answers first
            assert set(spans) == {((0, 0, 20),)}
            made_by = [json.loads(line)["weights"] for line in account.read_text().splitlines()]
            assert made_by == [[str(tiny)]] * 5, "the first look, and the four"
        else:
            assert all([version for version, *_ in of_one] == [0, 1] for of_one in spans)
            assert all(a[2] == b[1] for a, b in spans)
        [after] = await engine.generate("a", EIGHT)
        assert after.version_spans == ((1, 0, 8),)  # type: ignore[attr-defined]
        assert engine.model_version == 1


async def test_a_server_with_other_weights_gets_the_first_ones_first(tiny: Path, other: Path, tmp_path: Path) -> None:
    account = tmp_path / "account"
    server = stand_in(other, tmp_path / "log", "--account", str(account)).start()
    with ended(server):
        async with met(server.ready(), tiny) as engine:
            await engine.load_weights(7, str(other))
        async with met(server, tiny) as engine:  # the next life finds the weights of this one
            await engine.generate("a", EIGHT)
    made_by = {folder for line in account.read_text().splitlines() for folder in json.loads(line)["weights"]}
    assert made_by == {str(tiny)}


async def test_a_server_that_was_left_paused_goes_on(tiny: Path, tmp_path: Path) -> None:
    server = stand_in(tiny, tmp_path / "log").start()
    with ended(server):
        async with met(server.ready(), tiny) as engine:
            await engine.server.pause()  # and its runner is killed
        async with met(server, tiny) as engine:
            assert await engine.generate("a", EIGHT)


async def test_a_change_that_fails_half_way_leaves_a_server_that_nobody_uses(tiny: Path, tmp_path: Path) -> None:
    server = stand_in(tiny, tmp_path / "log").start()
    with ended(server):
        async with met(server.ready(), tiny) as engine:
            with pytest.raises(EngineError, match="no weights at") as failed:
                await engine.load_weights(1, "/not/there")
            assert failed.value.details["dead"]
            assert server.ask("/weight_info")["weight_version"].startswith("trinity-es/broken")
        with pytest.raises(EngineError, match=r"failed half-way. Start it with `vllm serve"):
            async with met(server, tiny):
                pass


async def test_weights_that_can_t_be_loaded_are_refused_before_anything_is_touched(tiny: Path, tmp_path: Path) -> None:
    async with stood_in(tiny, tmp_path) as (_, engine):
        with pytest.raises(SyncError, match="holds no weights; still serving version 0"):
            await engine.load_weights(1, str(tmp_path))
        assert (await engine.generate("a", EIGHT))[0].version_spans == ((0, 0, 8),)  # type: ignore[attr-defined]


async def test_a_server_that_takes_no_weights_says_how_to_start_it(tiny: Path, other: Path, tmp_path: Path) -> None:
    server = stand_in(tiny, tmp_path / "log", "--no-dev").start()
    strange = stand_in(other, tmp_path / "log2", "--no-dev").start()
    with ended(server, strange):
        async with met(server.ready(), tiny) as engine:
            with pytest.raises(SyncError, match=r"VLLM_SERVER_DEV_MODE=1 in its environment, or give "):
                await engine.load_weights(1, str(other))
            assert await engine.generate("a", EIGHT)
        with pytest.raises(EngineError, match=f"it serves {other}. Start it with `vllm serve {tiny}`"):
            async with met(strange.ready(), tiny):
                pass


async def test_a_restart_command_brings_weights_into_any_server(tiny: Path, other: Path, tmp_path: Path) -> None:
    server = stand_in(tiny, tmp_path / "log", "--no-dev").start()
    script = tmp_path / "restart.sh"
    pids = tmp_path / "pid"
    pids.write_text(str(server.process.pid))
    start = shlex.join([sys.executable, "-m", "tests.helpers.vllm_stand_in", "--no-dev", "--port", str(server.port)])
    script.write_text(
        f"kill -9 $(cat {pids})\ntest \"$TRINITY_ES_PATH\" = \"$2\" && test \"$TRINITY_ES_URL\" = \"$1\" || exit 9\n"
        f"cd {ROOT} && nohup {start} --model \"$2\" > {tmp_path}/log3 2>&1 &\necho $! > {pids}\n"
    )
    with ended(server):
        command = f"sh {script} {{url}} {{path}}"
        try:
            async with met(server.ready(), tiny, restart_command=command) as engine:
                asked = asyncio.create_task(engine.generate("a", EIGHT))
                await asyncio.sleep(0)
                await engine.load_weights(3, str(other))
                assert (await asked)[0].version_spans == ((0, 0, 8),)  # type: ignore[attr-defined]
                assert (await engine.generate("a", EIGHT))[0].version_spans == ((3, 0, 8),)  # type: ignore[attr-defined]
                assert server.ask("/v1/models")["data"][0]["root"] == str(other)
            known = {"restart_command": command, "weights": (3, str(other))}
            process = pids.read_text()
            async with met(server, tiny, **known) as engine:  # another runner, of a server that has the current weights
                assert (await engine.generate("a", EIGHT))[0].version_spans == ((3, 0, 8),)  # type: ignore[attr-defined]
                assert engine.model_version == 3
            assert pids.read_text() == process, "it was not restarted"
            server.kill()
            ServerProcess(["kill", "-9", pids.read_text().strip()], 0, tmp_path / "log4").start().process.wait()  # type: ignore[union-attr]
            async with met(server, tiny, **known, restart_after=0.5) as engine:  # it is not there
                assert (await engine.generate("a", EIGHT))[0].version_spans == ((3, 0, 8),)  # type: ignore[attr-defined]
                assert server.ask("/v1/models")["data"][0]["root"] == str(other)
            for lazy, told in (("true", "did not come back"), ("sleep 60", "had not ended after 1 s")):
                with pytest.raises(EngineError, match=told):
                    async with met(server, tiny, restart_command=lazy, restart_timeout=1.0):
                        pass
            with pytest.raises(EngineError, match=r"servers.restart_command failed \(exit status 5\)"):
                async with met(server, tiny, restart_command="exit 5"):
                    pass
        finally:
            ServerProcess(["kill", "-9", pids.read_text().strip()], 0, tmp_path / "log5").start().process.wait()  # type: ignore[union-attr]


def publish_anew(folder: Path, by: str) -> None:
    """Publish other weights from the folder of the last ones."""
    new = folder.with_name("new")
    shutil.copytree(folder, new)
    if by == "a link":
        folder.rename(folder.with_name("old"))
        folder.symlink_to(new)
    else:
        shutil.rmtree(folder)
        new.rename(folder)


@pytest.mark.parametrize("by", ["a link", "a move"])
@pytest.mark.parametrize("arguments", [("--no-dev",), ()], ids=["plain", "labels"])
async def test_a_path_does_not_prove_which_version_a_server_was_started_with(
    tiny: Path, other: Path, tmp_path: Path, by: str, arguments: tuple[str, ...]
) -> None:
    latest = tmp_path / "latest"
    shutil.copytree(other, latest)
    time.sleep(0.05)  # a process starts at a tick of the clock
    server = stand_in(latest, tmp_path / "log", *arguments).start()  # with version 5, by the restart command say
    with ended(server):
        account = tmp_path / "account"
        options = {"restart_command": f"echo $TRINITY_ES_VERSION >> {account}; exit 5"}
        server.ready()
        publish_anew(latest, by)
        if not arguments:  # it can be given the weights
            async with met(server, tiny, **options, weights=(7, str(latest))) as engine:
                assert engine.model_version == 0
                assert server.ask("/weight_info")["weight_version"].startswith("trinity-es/0/")
            assert not account.exists()
            return
        with pytest.raises(EngineError, match="exit status 5"):
            async with met(server, tiny, **options, weights=(7, str(latest))):
                pass
        assert account.read_text() == "7\n"


async def test_the_key_comes_by_the_environment_and_is_in_no_message(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stand_in(tiny, tmp_path / "log", "--api-key", "open-sesame").start()
    with ended(server):
        monkeypatch.setenv("THEIR_KEY", "wrong-word")
        with pytest.raises(EngineError, match=r"refuses the key in THEIR_KEY \(401\)") as refused:
            async with met(server.ready(), tiny, key_variable="THEIR_KEY"):
                pass
        assert "wrong-word" not in str(refused.value)
        monkeypatch.setenv("THEIR_KEY", "open-sesame")
        async with met(server, tiny, key_variable="THEIR_KEY") as engine:
            assert await engine.generate("a", EIGHT)
            assert engine.server._without_key("Bearer open-sesame") == "Bearer ***"


async def test_logprobs_before_temperature_are_refused_where_it_matters(tiny: Path, tmp_path: Path) -> None:
    async with stood_in(tiny, tmp_path, "--logprobs-mode", "raw_logprobs") as (_, engine):
        assert await engine.generate("a", EIGHT)
        assert await engine.generate("a", Sampling(max_tokens=2, temperature=0.5, logprobs=False))
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs") as refused:
            await engine.generate("a", Sampling(max_tokens=2, temperature=0.5))
        assert refused.value.details["refused"]


def test_neither_torch_nor_vllm_is_imported(tiny: Path) -> None:
    code = (
        "import sys; from trinity_es.actors.engines.http.engine import HTTPEngine, EngineConfig;"
        f"engine = HTTPEngine(EngineConfig(model_path={str(tiny)!r}, options={{'url': 'http://a:1'}}));"
        "print(engine.load_tokenizer(engine.config).decode([64]), {'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "a set()\n", done.stderr[-2000:]


async def test_who_gives_up_ends_the_request_in_the_server(tiny: Path, tmp_path: Path) -> None:
    account = tmp_path / "account"
    async with stood_in(tiny, tmp_path, "--token-seconds", "0.1", "--account", str(account)) as (_, engine):
        asked = asyncio.create_task(engine.generate("a", EIGHT))
        await asyncio.sleep(0.2)
        asked.cancel()
        await asyncio.wait({asked})
        await asyncio.sleep(1.0)
        assert engine.dead is None
    assert [json.loads(line)["tokens"] for line in account.read_text().splitlines()] == [4], "but for the first look"


async def test_a_restart_in_the_middle_of_a_change_is_not_taken_for_its_end(
    tiny: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the weights came, and before they were labelled: the label would name weights that are gone."""
    async with stood_in(tiny, tmp_path) as (server, engine):
        real = http_weights.ServerWeights._label_weights

        async def late(self: Any, version: int) -> None:
            server.kill()
            server.start().ready()
            await real(self, version)

        monkeypatch.setattr(http_weights.ServerWeights, "_label_weights", late)
        with pytest.raises(EngineError, match="restarted while its weights changed") as failed:
            await engine.load_weights(1, str(other))
        assert failed.value.details["dead"]


@pytest.mark.parametrize("tells", [True, False], ids=["with gauges", "without"])
async def test_places_follow_the_load_in_a_server_s_metrics_and_else_stay_which_is_said_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tells: bool
) -> None:
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.05)
    places, counts = Places("auto"), list[int]()

    def follow(engine: HTTPEngine) -> None:
        places.watch(engine, lambda: counts.append(places.count), None)

    gauges = ("--kv-share", "0.3") if tells else ()
    async with stood_in(tiny, tmp_path, "--token-seconds", "0.02", *gauges, prepare=follow) as (server, engine):

        async def unit() -> None:
            async with places:
                await engine.generate("a", EIGHT)

        await asyncio.gather(*(unit() for _ in range(3 * START)))
        assert engine.dead is None
    assert (counts[:1], places.kv_share) == (([2 * START], 0.3) if tells else ([], 0.0))
    warning = f"{server.url}/metrics lacks the gauges of its load, so max_concurrency: auto keeps its number of places"
    assert [r.message for r in caplog.records if "max_concurrency" in r.message] == ([] if tells else [warning])


async def test_late_or_no_metrics_end_no_engine(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.01)
    looks = list[float]()

    async def silent(self: VLLMServer, seconds: float = 0.0) -> str:
        looks.append(seconds)
        raise ServerGone("it does not answer")

    def follow(engine: HTTPEngine) -> None:
        Places("auto").watch(engine, lambda: None, None)

    async with stood_in(tiny, tmp_path, "--kv-share", "0.5", prepare=follow) as (_, engine):
        monkeypatch.setattr(http_engine, "SILENT_SECONDS", 0.0)
        monkeypatch.setattr(VLLMServer, "metrics", silent)
        await asyncio.sleep(0.3)
        assert engine.dead is None
    assert len(looks) > 2
