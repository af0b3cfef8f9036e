"""Environments of others: what a failure is, what an action is, what is learned from, what is installed and where."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest
from pydantic import BaseModel, ConfigDict

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import classify
from trinity_es.cli.commands import env
from trinity_es.config.config import Config
from trinity_es.environments import installs, openenv, verifiers_main
from trinity_es.environments.installs import Installed
from trinity_es.environments.openenv import action_of, is_about_action
from trinity_es.environments.verifiers_tasks import environment_config
from trinity_es.environments.verifiers_workflow import failure_of
from trinity_es.events.errors import ConfigError, EnvironmentFailed, WorkflowError, error_from_dict, error_to_dict
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine


# --- verifiers --------------------------------------------------------------------------------------------------------
def part(*errors: str, timeout: bool = False, unanswered: Sequence[str] = ()) -> dict[str, Any]:
    told = [[{"type": e, "message": "why"} for e in some] for some in (errors, unanswered)]
    return {"errors": told[0], "is_timeout": timeout, "stop": "agent_timeout", "ok": not (errors or timeout),
            "unanswered": told[1]}


@pytest.mark.parametrize(("episode", "traces", "kind"), [
    (part(), [part("SandboxError")], "infra"),
    (part(), [part("ProviderError")], "infra"),
    (part(), [part("TunnelError")], "infra"),
    (part(), [part("InterceptionError")], "infra"),
    (part(), [part("HarnessError")], "workflow"),
    (part(), [part("TaskError")], "workflow"),
    (part(), [part("ToolsetError")], "workflow"),
    (part("EnvError"), [], "workflow"),
    (part("EnvError"), [part("SandboxError")], "infra"),
    (part(), [part("TaskError"), part("SandboxError")], "infra"),
    (part(timeout=True), [], "timeout"),
    (part(), [part(timeout=True)], "timeout"),
    (part(), [part("HarnessError", timeout=True)], "timeout"),
    (part(), [], "workflow"),
])
def test_a_typed_error_has_its_kind(episode: dict[str, Any], traces: list[dict[str, Any]], kind: str) -> None:
    failure = failure_of({**episode, "complete": False, "traces": traces})
    assert isinstance(failure, EnvironmentFailed)
    assert classify(failure)[0] == kind
    assert classify(error_from_dict(error_to_dict(failure)))[0] == kind


@pytest.mark.parametrize(("traces", "kind"), [
    ([part()], None), ([part("SandboxError")], None),  # the environment says so itself
    ([part(timeout=True)], "timeout"),
    ([part(), part(unanswered=["ProviderError"])], "infra"),  # the engine failed: no end that an agent may take for one
    ([part(), part("ProviderError", unanswered=["ProviderError"])], None),
])
def test_an_episode_that_is_complete_is_no_failure_but_for_a_time_limit_and_a_call_that_the_engine_failed_at(
    traces: list[dict[str, Any]], kind: str | None
) -> None:
    failure = failure_of({**part(), "complete": True, "traces": traces})
    assert (None if failure is None else classify(failure)[0]) == kind


def call(begin: float, end: float, status: int | None = 200, kind: str = "ProviderError") -> Any:
    error = None if status == 200 else SimpleNamespace(type=kind, message="why", status_code=status)
    return SimpleNamespace(time=SimpleNamespace(start=begin, end=end), error=error)


@pytest.mark.parametrize(("calls", "unanswered"), [
    ([call(0, 1)], 0),
    ([call(0, 1), call(1, 2, 500)], 1),
    ([call(0, 1, 500), call(1, 2)], 0),  # asked again
    ([call(0, 1, 500), call(1, 2), call(2, 3, 503)], 1),
    ([call(0, 2, 500), call(1, 3)], 1),  # the other was asked before this one had failed
    ([call(0, 1), call(1, 2, 400)], 0),  # refused: a prompt that is too long
    ([call(0, 1), call(1, 2, None, "CancelledError")], 0),
    ([call(0, 1), call(1, 2, None, "TaskError")], 1),
])
def test_a_call_that_failed_is_made_good_by_one_that_was_asked_later(calls: list[Any], unanswered: int) -> None:
    assert len(verifiers_main.unanswered_errors(calls)) == unanswered


class Served:
    """verifiers_main.py as it plays, in this loop, and the end of the socket that asks it; no verifiers is needed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any]) -> None:
        names = ["verifiers", "verifiers.v1", "verifiers.v1.utils"]
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[names[-1]].loaders = SimpleNamespace(  # type: ignore[attr-defined]
            load_environment=load, load_taskset=load)
        monkeypatch.setattr(verifiers_main, "resolve_config", lambda given: given)
        monkeypatch.setattr(verifiers_main, "share_http_client", lambda endpoints: None)
        monkeypatch.setattr(verifiers_main.Server, "episode", self.episode)
        self.begun = asyncio.Event()

    async def episode(self, asked: Any) -> Any:
        self.begun.set()
        await asyncio.sleep(60)

    async def ask(self, message: Any) -> None:
        self.writer.write(verifiers_main.as_frame(message))

    async def heard(self) -> Any:
        return await asyncio.wait_for(verifiers_main.read_message(self.reader), 10)

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        self.task = asyncio.create_task(verifiers_main.serve(theirs))
        self.reader, self.writer = await asyncio.open_unix_connection(sock=ours)
        await self.ask({})
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.writer.close()


class Environment:
    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield


async def test_a_cancel_is_heard_at_once_and_an_unasked_one_fails_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Served(monkeypatch, lambda config: Environment()) as served:
        assert "pid" in (await served.heard())["result"]
        await served.ask({"id": 1, "run": {}})
        await served.ask({"id": 2, "run": {}})
        await served.begun.wait()
        await served.ask({"id": 1, "cancel": True})
        assert await served.heard() == {"id": 1, "heard": True}
        assert (await served.heard())["error"]["type"] == "Cancelled"
        served.task.cancel()  # as SIGTERM does
        await asyncio.wait_for(served.task, 10)
        with pytest.raises(asyncio.IncompleteReadError):  # its end is what is told of the other
            await served.heard()


class Keyed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    at: int = 0


async def test_what_pydantic_was_given_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Any) -> Any:
        Keyed.model_validate({"service_key": "hush", "at": "hushed"})

    async with Served(monkeypatch, load) as served:
        said = (await served.heard())["error"]
    assert said["type"] == "ValidationError"
    texts = [said["message"]]
    monkeypatch.setattr(verifiers_main, "resolve_config", load)
    for asked in (["load", "mine"], ["tasks", "file", "0"]):
        monkeypatch.setattr(sys, "argv", ["verifiers_main.py", *asked])
        monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
        with pytest.raises(SystemExit) as ended:
            verifiers_main.main()
        assert ended.value.__suppress_context__
        texts.append(str(ended.value))
    for text in texts:
        assert "at: Input should be a valid integer" in text
        assert "service_key: Extra inputs are not permitted" in text
        assert "hush" not in text


def test_an_environment_that_is_gone_is_infra() -> None:
    assert classify(EnvironmentFailed("the process has ended"))[0] == "infra"


async def test_only_ids_that_this_run_sampled_are_learned_from_each_of_them_once() -> None:
    model = Model(ScriptedEngine(EngineConfig(model_path="", options={"response": "ee"})))
    [first] = await model.generate_async([65, 66])
    one = first.tokens.tolist()
    [second] = await model.generate_async([*one, 67])
    [third] = await model.generate_async([*one, 68, 69])
    two, three = second.tokens.tolist(), third.tokens.tolist()
    both = model.experiences_of_ids([
        ([*two, 70, 71], [(2, 4), (5, 7)], []), (three, [(2, 4), (6, 8)], []), (one, [(2, 4)], []), ([1], [], []),
    ])
    assert [e.tokens.tolist() for e in both] == [two, three]
    assert [e.prompt_length for e in both] == [2, 6]
    assert [e.action_mask.tolist() for e in both if e.action_mask is not None] == [
        [True, True, False, True, True], [True, True]]
    for tokens, answers in (([65, 66, 101, 102], [(2, 4)]), (two, [(2, 5), (5, 7)]), (two, [(1, 4), (5, 7)])):
        with pytest.raises(WorkflowError, match="as an answer that this run did not sample"):
            model.experiences_of_ids([(tokens, answers, [])])


async def test_of_equal_ids_those_are_meant_that_were_sampled_there() -> None:
    model = Model(ScriptedEngine(EngineConfig(model_path="", options={"response": "ee"})))
    await model.generate_async([65], max_tokens=2)
    await model.generate_async([65, 101], max_tokens=1)
    ids = [65, 101, 101]
    for begin in (1, 2):
        [e] = model.experiences_of_ids([(ids, [(begin, 3)], [])])
        assert e.prompt_length == begin


# --- OpenEnv ----------------------------------------------------------------------------------------------------------
ONE = {"required": ["guess"], "properties": {"guess": {"type": "string"}}}
NUMBER = {"required": ["at"], "properties": {"at": {"type": "integer"}}}


@pytest.mark.parametrize(("text", "schema", "action"), [
    ('{"a": 1}', ONE, {"a": 1}),
    ('```json\n{"a": 1}\n```', {}, {"a": 1}),
    (" crane ", ONE, {"guess": "crane"}),
    ("12", ONE, {"guess": "12"}),
    ("12", NUMBER, {"at": 12}),
])
def test_an_action_is_what_a_text_says(text: str, schema: dict[str, Any], action: dict[str, Any]) -> None:
    assert action_of(text, schema) == action


def test_a_text_that_is_no_action_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the fields"):
        action_of("well", {"required": ["x", "y"]})


@pytest.mark.parametrize(("action", "kind", "loc", "given", "is_about"), [
    ({"a": 1}, "missing", ["guess"], {"a": 1}, True),
    ({"a": 1}, "extra_forbidden", ["a"], 1, True),
    ({"guess": {"x": "q"}}, "int_parsing", ["guess", "x"], "q", True),
    ({"guess": [1]}, "int_type", ["guess", "int"], [1], True),  # of a union
    ({"guess": {"kind": "a"}}, "missing", ["guess", "A", "n"], {"kind": "a"}, True),
    (["a"], "dict_type", ["data"], ["a"], True),
    ({"guess": "a"}, "string_type", ["text"], None, False),
    ({"guess": "a"}, "string_type", ["text"], {"guess": "a"}, False),
    ({"guess": "a"}, "missing", ["text"], {"reward": 1.0}, False),
    ({"guess": "a"}, "string_type", ["guess"], None, False),
])
def test_an_action_is_at_fault_where_what_is_not_valid_is_in_it(
    action: Any, kind: str, loc: list[str], given: Any, is_about: bool
) -> None:
    error = {"type": kind, "loc": loc, "msg": "why", "input": given}
    assert is_about_action(action, [error]) is is_about
    bug = {"type": "string_type", "loc": ["text"], "msg": "why", "input": None}
    assert not is_about_action(action if isinstance(action, dict) else {}, [error, bug])
    for none in ([], None, ["why"], [{}]):
        assert not is_about_action({"guess": "a"}, none)


# --- what is installed ------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINITY_ES_ENVIRONMENTS", str(tmp_path))
    made = tmp_path / "gsm8k-v1"
    made.mkdir()
    told = {"name": "gsm8k-v1", "distribution": "gsm8k-v1", "packages": ["gsm8k-v1"], "folder": "install-0",
            "versions": {"gsm8k-v1": "0.1", "verifiers": "0.4.0"}}
    (made / "environment.json").write_text(json.dumps(told))
    (tmp_path / "unfinished").mkdir()
    return tmp_path


def test_environments_lie_where_the_user_says_or_in_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("TRINITY_ES_ENVIRONMENTS", raising=False)
    assert installs.environments_folder() == tmp_path / "trinity_es" / "environments"
    monkeypatch.setenv("TRINITY_ES_ENVIRONMENTS", str(tmp_path / "mine"))
    assert installs.environments_folder() == tmp_path / "mine"


def test_an_environment_is_found_by_any_spelling_and_one_that_is_not_there_says_how_to_get_it(folder: Path) -> None:
    assert [e.name for e in installs.installed()] == ["gsm8k-v1"]
    assert installs.find("GSM8K_v1").version == "0.1"
    with pytest.raises(ConfigError, match="trinity-es env install unfinished"):
        installs.find("unfinished")
    installs.remove("gsm8k-v1")
    assert not (folder / "gsm8k-v1").exists()


@pytest.mark.parametrize(("package", "name", "said"), [
    *((package, None, "is not a package") for package in ("a b", "--index-url=x", "/no/such/folder", "")),
    *(("gsm8k-v1", name, "can't be an environment's name")
      for name in ("../gsm8k-v1", "a/b", "..", "/tmp/x", "-a", ".", "a b", "ä")),
])
def test_what_is_no_package_or_no_folder_of_its_own_is_refused_before_anything_is_made(
    folder: Path, package: str, name: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        installs.install(package, name=name)
    assert sorted(p.name for p in folder.iterdir()) == ["gsm8k-v1", "unfinished"]


def test_without_uv_an_install_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installs, "uv", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-es\[environments\]'"):
        installs.install("gsm8k-v1")
    assert sorted(p.name for p in folder.iterdir()) == ["gsm8k-v1", "unfinished"]


def test_an_install_that_fails_leaves_what_was_there_and_one_that_ends_keeps_the_last_for_who_reads_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installs, "_run", lambda command, say: json.dumps({"gsm8k-v1": "0.2", "verifiers": "0.4.1"}))
    first = installs.install("gsm8k-v1")
    (first.folder / "task").touch()

    def fails(command: Sequence[str], say: Any) -> str:
        raise ConfigError("no network")

    with monkeypatch.context() as offline:
        offline.setattr(installs, "_run", fails)
        with pytest.raises(ConfigError, match="no network"):
            installs.install("gsm8k-v1")

    def loads_not(command: Sequence[str], say: Any) -> str:
        if "load" in command:
            raise ConfigError("python -I ... failed with status 1: Traceback\nModuleNotFoundError: no gsm8k_v1\n")
        return json.dumps({"gsm8k-v1": "0.2", "verifiers": "0.4.1"})

    with monkeypatch.context() as misnamed:
        misnamed.setattr(installs, "_run", loads_not)
        with pytest.raises(ConfigError, match="can't load the taskset 'gsm8k-v1': ModuleNotFoundError: no gsm8k_v1"):
            installs.install("gsm8k-v1")
    assert installs.find("gsm8k-v1") == first
    other = installs.install("gsm8k-v1", name="Mine")
    assert installs.find("mine") == other
    assert (other.name, other.distribution) == ("mine", "gsm8k-v1")
    assert (first.folder / "task").exists()
    second = installs.install("gsm8k-v1", name="gsm8k-v1")
    assert installs.find("gsm8k-v1") == second != first
    assert first.folder.exists()
    third = installs.install("gsm8k-v1")
    assert set((folder / "gsm8k-v1").glob("install-*")) == {second.folder, third.folder}


def test_an_environment_is_asked_for_by_its_package_whatever_it_is_called_here(tmp_path: Path) -> None:
    def id_of(name: str, distribution: str, **taskset: Any) -> Any:
        one = Installed(name=name, distribution=distribution, packages=[], versions={}, folder=tmp_path)
        return environment_config(one, {"env": name, "config": {"taskset": taskset}})["taskset"]["id"]

    assert id_of("mine", "gsm8k-v1") == "gsm8k-v1"
    assert id_of("textarena", "verifiers") == "textarena"
    assert id_of("mine", "verifiers", id="textarena") == "textarena"


def config_of(*tasksets: dict[str, Any]) -> Config:
    return Config.from_dict({
        "name": "x", "explorer": {"rollout_model": {"engine_type": "scripted"}},
        "buffer": {"explorer_input": {"tasksets": list(tasksets)}},
    })


def test_one_line_names_an_environment_as_its_taskset(folder: Path, tmp_path: Path) -> None:
    line = {"name": "math", "path": "verifiers:gsm8k-v1"}
    config = config_of(line)
    config.check()
    [taskset] = config.buffer.explorer_input.tasksets
    assert (taskset.workflow, taskset.workflow_args) == ("verifiers", {"env": "gsm8k-v1"})
    assert taskset.path == "verifiers:gsm8k-v1"
    with pytest.raises(ConfigError, match="trinity-es env install wordle"):
        config_of({**line, "path": "verifiers:wordle"}).check()


def test_a_check_plays_an_environment_as_its_config_says_however_that_spells_it(folder: Path) -> None:
    for path in ("verifiers:gsm8k-v1", "verifiers:GSM8K_v1"):
        math = {"name": "math", "path": path, "workflow_args": {"tasks": 7}}
        config = config_of({"name": "other", "path": "rows.jsonl"}, math)
        [mine] = env._with_environment(config, "gsm8k-v1").buffer.explorer_input.tasksets
        assert (mine.path, mine.workflow_args["tasks"]) == (path, 7)
    [none] = env._with_environment(config, "gsm8k-v2").buffer.explorer_input.tasksets
    assert none.path == "verifiers:gsm8k-v2"


# --- a check ----------------------------------------------------------------------------------------------------------
def test_a_check_shows_each_token_and_which_of_them_the_model_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    experience = Experience(
        tokens=[7, 8, 9, 10], prompt_length=2, action_mask=[False, True], logprobs=[0.0, -0.25], reward=0.5,
        metrics={"share": 0.5}, messages=[{"role": "user", "content": "\x1b[31mred"}])
    texts = ["Spell", " it:", "\n", "s"]
    assert env.tokens(experience, texts) == [
        {"at": 0, "id": 7, "text": "Spell", "sampled": False, "logprob": None},
        {"at": 1, "id": 8, "text": " it:", "sampled": False, "logprob": None},
        {"at": 2, "id": 9, "text": "\n", "sampled": False, "logprob": None},
        {"at": 3, "id": 10, "text": "s", "sampled": True, "logprob": -0.25}]
    env.show([experience], [texts], [(0, "infra", "the process has ended")])
    shown = capsys.readouterr().out
    assert "reward 0.5, 4 tokens, 1 of them written by the model" in shown
    assert '0-2  read  "Spell it:\\n"' in shown
    assert '3      id 10       "s"          logprob -0.2500' in shown
    assert "FAILED (infra): the process has ended" in shown
    env.show([experience], [["\x1b[31m", "red", "\x9b", "s"]], [])
    shown = capsys.readouterr().out
    assert "red" in shown
    assert not {"\x1b", "\x9b"} & set(shown)


def test_a_removal_of_what_is_not_there_does_not_say_to_install_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gsm8k-v2' is not installed in .* \(there: gsm8k-v1\)$"):
        installs.remove("gsm8k-v2")


async def test_a_run_tells_that_its_server_is_not_there_and_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "TELL_SECONDS", 0.0)
    with socket.socket() as nobody:  # bound and not listening: who connects is refused
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        told: list[str] = []

        async def tell(what: str) -> None:
            told.append(what)

        with pytest.raises(EnvironmentFailed, match="can't be reached"):
            async with openenv.session({"url": url, "connect_timeout": 1.5}, tell):
                pass
    assert told
    assert all(text.startswith(f"the OpenEnv server {url}: Cannot connect to host ") for text in told)
    assert told[0].endswith(" s; it gives up in 1 s") or told[0].endswith(" s; it gives up in 2 s")
