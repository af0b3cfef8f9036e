"""An engine asked from afar gives what it would have given here: the same tokens, the same logprobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.helpers.endpoint import Recorder, until
from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.actors.engines.http.auxiliary_engine import RemoteEngine, remote_models
from trinity_es.actors.engines.http.pool import REPORT_SECONDS, SHUN_SECONDS, SLACK_REQUESTS
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.workflow_runner import AuxiliaryModel, WorkflowRunner
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.errors import ConfigError, EngineError, SyncError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.testing import ByteTokenizer, ManualClock, ScriptedEngine
from trinity_es.workflows.workflow import Workflow

HELLO = [{"role": "user", "content": "hi"}]


class Judge(Recorder):
    """May die."""

    dead = False

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        if self.dead:
            self.asked.append((prompt, sampling))
            raise EngineError("its core ended", dead=True)
        if prompt == "":
            raise EngineError("an empty prompt is refused", refused=True)
        return await super().generate(prompt, sampling)


class Host(httpx.AsyncBaseTransport):
    """Judges behind their routes, by host name; one that is not there refuses the connection."""

    def __init__(self) -> None:
        self.judges: dict[str, Judge] = {}
        self.apps: dict[str, httpx.ASGITransport] = {}
        self.tokens: list[str | None] = []
        self.told_dead: list[str] = []

    def add(self, name: str, **script: Any) -> Judge:
        judge = self.judges[name] = Judge(**script)
        server = EngineServer(judge, name="judge", token="secret", exact=True, on_dead=self.told_dead.append)
        self.apps[name] = httpx.ASGITransport(server.answer)
        return judge

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.tokens.append(request.headers.get("authorization"))
        if request.url.host not in self.apps:
            raise httpx.ConnectError("refused")
        return await self.apps[request.url.host].handle_async_request(request)


@pytest.fixture
def host() -> Host:
    return Host()


def remote(host: Host, *names: str, **given: Any) -> RemoteEngine:
    engine = RemoteEngine("judge", ByteTokenizer(), token="secret", transport=host, **given)
    engine.update({name: f"http://{name}" for name in names})
    return engine


def same(found: list[Experience], own: list[Experience]) -> bool:
    def plain(e: Experience) -> list[Any]:
        return [e.tokens.tolist(), e.prompt_length, e.logprobs.tolist(), e.response_text, e.prompt_text,
                e.truncate_status, e.info]

    return bool(found) and [plain(e) for e in found] == [plain(e) for e in own]


async def test_p15_a_model_on_a_remote_engine_gives_what_the_engine_gives(host: Host) -> None:
    judge = host.add("judge-0")
    far, near = Model(remote(host, "judge-0")), Model(Judge())
    asked: dict[str, Any] = {"n": 3, "max_tokens": 9, "seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 7}
    assert same(await far.chat_async(HELLO, **asked), await near.chat_async(HELLO, **asked))
    prompts: list[Any] = ["one", [97, 98]]
    assert same(await far.generate_async(prompts, **asked), await near.generate_async(prompts, **asked))
    for ids in ([97, 98, 99], list(range(60))):
        assert (await far.logprobs_async(ids, 0.5)).tolist() == (await near.logprobs_async(ids, 0.5)).tolist()
    talk = [*HELLO, {"role": "assistant", "content": "yes"}]
    [own] = await far.chat_async(HELLO)
    await near.chat_async(HELLO)
    answered = [*HELLO, {"role": "assistant", "content": own.response_text}]
    more = [*answered, {"role": "user", "content": "more"}, {"role": "assistant", "content": "yes"}]
    for of_others in (talk, more):  # though it was asked the same, and gave an answer in it
        judged = await far.experience_from_messages_async(of_others)
        assert same([judged], [await near.experience_from_messages_async(of_others, as_text=True)])
    assert far.usage == near.usage
    assert host.tokens[0] == "Bearer secret"
    assert judge.asked[0][1] == Sampling(n=3, max_tokens=9, seed=5, temperature=0.7, top_p=0.9, top_k=7)


async def test_p15_all_of_a_sampling_and_logprobs_that_are_no_json_number_arrive(host: Host) -> None:
    judge = host.add("judge-0", response="x")
    given = Sampling(temperature=0.1, top_p=0.2, top_k=3, max_tokens=4, logprobs=False, seed=5, n=6, stop=("a", "b"),
                     ignore_eos=True)
    engine = remote(host, "judge-0")
    found = await engine.generate([1, 2], given)
    assert judge.asked == [([1, 2], given)]
    assert [c.logprobs for c in found] == [None] * 6

    async def never(token_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [float("-inf"), -0.1]

    judge.logprobs = never  # type: ignore[method-assign]
    assert await engine.logprobs([1, 2, 3]) == [float("-inf"), -0.1]


async def test_p15_an_error_of_the_engine_is_the_same_error_here(host: Host) -> None:
    host.add("judge-0", rules=[{"prompt": "bad", "error": "out of memory"}])
    engine = remote(host, "judge-0")
    with pytest.raises(EngineError, match="an empty prompt") as refused:
        await engine.generate("", Sampling())
    assert refused.value.details["refused"]
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate("bad", Sampling())
    with pytest.raises(SyncError, match="judge"):
        await engine.load_weights(1, "/somewhere")


async def test_p15_requests_of_a_task_stay_on_one_engine_and_tasks_are_shared(host: Host) -> None:
    judges = [host.add(f"judge-{n}", latency_seconds=0.02) for n in range(2)]
    engine = remote(host, "judge-0", "judge-1")
    prompts = [f"{task} {i}" for task in range(16) for i in range(4)]
    await asyncio.gather(*(engine.generate(p, Sampling(), f"1/{p.split()[0]}") for p in prompts))
    seen = [{str(p).split()[0] for p, _ in judge.asked} for judge in judges]
    assert not seen[0] & seen[1]
    assert [len(judge.asked) for judge in judges] == [32, 32]


async def test_p15_a_task_leaves_an_engine_that_is_much_fuller(host: Host) -> None:
    judges = {n: host.add(n, latency_seconds=0.1) for n in ("judge-0", "judge-1")}
    engine = remote(host, *judges)
    await asyncio.gather(*(engine.generate(f"{i}", Sampling(), "1/0") for i in range(SLACK_REQUESTS + 3)))
    asked = sorted(len(judge.asked) for judge in judges.values())
    assert asked == [2, SLACK_REQUESTS + 1]


async def test_p15_what_an_engine_does_for_others_counts_until_it_is_old(host: Host) -> None:
    for name in ("judge-0", "judge-1"):
        host.add(name, latency_seconds=0.05)
    clock = ManualClock()
    mine, other = remote(host, "judge-0", clock=clock), remote(host, "judge-0")
    theirs = [asyncio.create_task(other.generate(f"{i}", Sampling(max_tokens=2))) for i in range(6)]
    while len(host.judges["judge-0"].asked) < 6:
        await asyncio.sleep(0)
    host.judges["judge-0"].script["latency_seconds"] = 0.0
    await mine.generate("x", Sampling(max_tokens=2))  # its answer tells of the six
    mine.update({"judge-0": "http://judge-0", "judge-1": "http://judge-1"})
    assert {mine.pool.choose([f"1/{task}"]).runner for task in range(20)} == {"judge-1"}
    clock.advance(REPORT_SECONDS)
    assert {mine.pool.choose([f"2/{task}"]).runner for task in range(20)} == {"judge-0", "judge-1"}
    await asyncio.gather(*theirs)


async def test_p15_an_engine_that_is_gone_is_left_alone_and_another_answers(host: Host) -> None:
    host.add("judge-1", response="yes")
    engine = remote(host, "judge-0", "judge-1")
    found = await asyncio.gather(*(engine.generate("x", Sampling(), f"1/{i}") for i in range(20)))
    assert [c.text for [c] in found] == ["yes"] * 20
    assert len(host.tokens) < 40  # not once for each of them


async def test_p15_a_request_waits_until_there_is_an_engine_and_outlives_the_death_of_one(host: Host) -> None:
    engine = remote(host)
    asking = asyncio.create_task(engine.generate("x", Sampling()))
    await asyncio.sleep(2 * SHUN_SECONDS)
    assert not asking.done()
    first = host.add("first", response="never told")
    first.dead = True
    engine.update({"judge-0": "http://first"})
    await until(lambda: first.asked, "the first to be asked")
    assert host.told_dead == ["its core ended"]
    host.add("second", response="here I am")
    engine.update({"judge-0": "http://second"})
    [answer] = await asyncio.wait_for(asking, SHUN_SECONDS / 2)  # at once: the new one is told, not found by trying
    assert answer.text == "here I am"


async def test_promise_10_a_request_that_ends_engines_fails_and_does_not_go_round(host: Host) -> None:
    judges = [host.add(f"judge-{i}") for i in range(4)]
    for judge in judges:
        judge.dead = True
    engine = remote(host, *host.judges)
    with pytest.raises(EngineError, match="2 engines of auxiliary model 'judge' ended"):
        await asyncio.wait_for(engine.generate("poison", Sampling(), "1/0"), 20)
    assert sum(bool(judge.asked) for judge in judges) == 2


async def test_p15_a_caller_that_hangs_up_ends_its_request(host: Host) -> None:
    judge = Judge(rules=[{"prompt": "hang", "hang": True}])
    server = EngineServer(judge, name="judge", token="t", exact=True)
    engine = RemoteEngine("judge", ByteTokenizer(), token="t")
    engine.update({"judge-0": await server.start()})
    try:
        asking = asyncio.create_task(engine.generate("hang", Sampling()))
        await until(lambda: judge.asked, "the request to arrive")
        asking.cancel()
        await until(lambda: judge.aborted, "its end in the engine")
        assert (await engine.generate("x", Sampling(max_tokens=2)))[0].token_ids
    finally:
        await engine.stop()
        await server.stop()


async def test_p15_the_routes_of_a_runner_ask_for_the_token_and_who_has_another_is_told_so() -> None:
    judge = Judge(response="yes")
    server = EngineServer(judge, name="judge", token="right", exact=True)
    url = await server.start()
    engines = {token: RemoteEngine("judge", ByteTokenizer(), token=token) for token in ("right", "wrong")}
    try:
        for engine in engines.values():
            engine.update({"judge-0": url})
        assert [c.text for c in await engines["right"].generate("x", Sampling())] == ["yes"]
        with pytest.raises(EngineError, match="judge-0 of the auxiliary model 'judge' answered 401"):
            await asyncio.wait_for(engines["wrong"].generate("x", Sampling()), 10)
        assert len(judge.asked) == 1
    finally:
        for engine in engines.values():
            await engine.stop()
        await server.stop()


class AsksTheJudge(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [mine] = await self.model.chat_async(HELLO)
        [said] = await self.auxiliary["judge"].generate_async("how was it", max_tokens=3)
        mine.reward = float(len(said.response_text))
        return [mine]


async def test_p15_a_judge_samples_by_its_own_config_and_not_by_the_tasks(host: Host) -> None:
    judge = host.add("judge-0")
    asked = AuxiliaryModel("judge", remote(host, "judge-0"), {"temperature": 0.0, "max_tokens": 20})
    runner = WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), auxiliary=[asked])
    task = Task(workflow=AsksTheJudge, rollout_args={"temperature": 0.9, "n": 1, "seed": 5})
    done = await runner.execute(replace(task, task_id=3), 1, range(2))
    assert [e.reward for e in done.experiences] == [3.0, 3.0], done.failures
    assert {s for _, s in judge.asked} == {Sampling(temperature=0.0, max_tokens=3)}
    runners = asked.engine.pool._runner_by_key.values()  # type: ignore[attr-defined]
    assert Counter(runners) == {"judge-0": 1}, "both runs are one task's"


def test_p15_an_engine_class_without_a_tokenizer_of_its_own_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="load_tokenizer"):
        remote_models({"judge": RolloutModelConfig(engine_type="builtins:object")}, "t")
    assert list(remote_models({"judge": RolloutModelConfig(engine_type="scripted")}, "t")) == ["judge"]
