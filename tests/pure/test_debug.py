"""`trinity-es debug`: one task, played in this process (PARITY P38)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.helpers.handmade import cli
from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.run import single_task
from trinity_es.workflows.workflow import Workflow


class Broken(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        self._deep(40)
        return []

    def _deep(self, levels: int) -> None:
        if levels:
            self._deep(levels - 1)
        raise ZeroDivisionError("deep down")


class Asking(Workflow):
    def run(self) -> list[Experience]:
        [experience] = self.model.chat(self.prompt_messages(), max_tokens=3)
        experience.reward = 2.0
        return [experience]


class ByClient(Workflow):
    def run(self) -> list[Experience]:
        client = self.model.get_openai_client()
        client.chat.completions.create(model=client.model_path, messages=self.prompt_messages(), max_tokens=4)
        [experience] = self.model.extract_experience_from_history()
        experience.reward = 3.0
        return [experience]


class ByItself(Workflow):
    def run(self) -> list[Experience]:
        here = self.model.openai_endpoint()
        client = openai.OpenAI(base_url=here.base_url, api_key=here.token, max_retries=0)
        client.completions.create(model=here.model, prompt="hi", max_tokens=4)
        return self.model.extract_experience_from_history()


class Judged(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [experience] = await self.model.chat_async(self.prompt_messages())
        [verdict] = await self.auxiliary["judge"].chat_async([{"role": "user", "content": "well?"}])
        experience.reward = float(verdict.response_text == "good")
        return [experience]


def length(response: str, prompt: str, truth: str | None) -> dict[str, float]:
    return {"length": float(len(response)), "known": float(truth == "a7")}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"prompt": f"q{i}", "answer": f"a{i}"}) for i in range(9)))
    taskset = {"path": "t.jsonl", "reward_fn": "tests.pure.test_debug:length", "rollout_args": {"max_tokens": 5}}
    data: dict[str, Any] = {
        "explorer": {"rollout_model": {"engine_type": "scripted"}},
        "buffer": {"explorer_input": {
            "tasksets": [{"name": "first", "repeat_times": 2, **taskset}, {"name": "second", **taskset}],
            "eval_tasksets": [{"name": "check", **taskset}],
        }},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def played(*args: object) -> dict[str, Any]:
    done = cli("debug", *args, "--json")
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_p38_a_task_is_played_shown_and_kept_without_an_actor_system(config: Path) -> None:
    told = played(config, "--taskset", "second", "--index", 7, "--runs", 3)
    assert (told["taskset"], told["index"], told["runs"], told["completed_runs"]) == ("second", 7, 3, 3)
    assert [e["eid"]["run"] for e in told["experiences"]] == [0, 1, 2]
    assert {e["prompt_text"] for e in told["experiences"]} == {"q7\n"}
    assert {(e["reward"], e["response_length"], e["metrics"]["length"]) for e in told["experiences"]} == {(6.0, 5, 5.0)}
    folder = Path(told["folder"])
    assert folder.is_relative_to(config.parent)
    kept = Experience.deserialize_many((folder / "experiences.safetensors").read_bytes())
    lines = [json.loads(line) for line in (folder / "experiences.jsonl").read_text().splitlines()]
    assert [e.to_dict() for e in kept] == told["experiences"]
    assert [line["tokens"] for line in lines] == [e.tokens.tolist() for e in kept]
    assert not list(config.parent.rglob("log.sqlite"))


def test_p38_the_first_taskset_is_meant_and_a_person_reads_it(config: Path, tmp_path: Path) -> None:
    done = cli("debug", config, "--keep", tmp_path / "here")
    assert done.exit_code == 0, done.stderr
    assert "first row 0: 2 of 2 runs completed" in done.stdout
    assert "run 1 step 0: reward 5, 3 prompt tokens, 5 response tokens, response_truncated" in done.stdout
    assert "    q0" in done.stdout
    assert "    length = 5" in done.stdout
    assert f"results are in {tmp_path / 'here'}" in done.stdout
    assert json.loads((tmp_path / "here/result.json").read_text())["completed_runs"] == 2


def test_p38_an_error_is_shown_with_its_whole_traceback(config: Path) -> None:
    done = cli("debug", config, "--workflow", "tests.pure.test_debug:Broken")
    assert done.exit_code == 1
    assert "0 of 2 runs completed" in done.stdout
    assert "run 0 FAILED (workflow): ZeroDivisionError: deep down" in done.stdout
    assert done.stdout.count("self._deep(levels - 1)") >= 2 * 3
    assert "Traceback (most recent call last)" in done.stdout
    assert "in run_async" in done.stdout  # the outer end too, which a log's shorter text may have lost


JUDGE = "explorer.auxiliary_models=[{name: judge, engine_type: scripted, script: {response: good}}]"


@pytest.mark.parametrize(("workflow", "more", "found"), [
    ("Asking", ["--taskset", "check"], [(2.0, 3)]), ("ByClient", [], [(3.0, 4)] * 2), ("ByItself", [], [(0.0, 4)] * 2),
    ("Judged", ["--set", JUDGE], [(1.0, 5)] * 2),
])
def test_p38_another_workflow_asks_as_in_a_run_also_past_a_proxy(
    config: Path, monkeypatch: pytest.MonkeyPatch, workflow: str, more: list[str], found: list[tuple[float, int]]
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "corp.invalid" if "no" in name.lower() else "http://127.0.0.1:9")
    told = played(config, "--workflow", f"{__name__}:{workflow}", *more)["experiences"]
    assert [(e.get("reward", 0.0), e["response_length"]) for e in told] == found


def test_p38_what_is_not_there_is_named(config: Path) -> None:
    for option, value, told in (
        ("--taskset", "third", "there is no taskset third in the config (there are: first, second, check)"),
        ("--index", 9, "taskset first has 9 rows, 0 to 8: there is no row 9"),
        ("--workflow", "nothing", "'nothing' is not registered"),
    ):
        wrong = cli("debug", config, option, value)
        assert (wrong.exit_code, told in wrong.stderr) == (2, True), wrong.stderr


def test_p9_reply_prefix_is_the_beginning_of_the_answer(config: Path) -> None:
    told = played(config, "--set", "buffer.explorer_input.tasksets.0.format.reply_prefix=<think>")
    first = told["experiences"][0]
    assert "<think>" in first["prompt_text"]
    assert "<think>" not in first["response_text"]


def test_p38_an_engine_by_http_is_the_first_server_of_the_config() -> None:
    urls = ["http://a:1", "http://b:1"]
    first = RolloutModelConfig(engine_type="http", servers={"urls": urls, "key_variable": "KEY"})  # type: ignore[arg-type]
    options = single_task._engine_config(first).options
    assert (options["url"], options["key_variable"]) == ("http://a:1", "KEY")
    listed = RolloutModelConfig(engine_type="http", servers={"file": "servers.txt"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"name the server in servers.urls, in place of servers.file"):
        single_task._engine_config(listed)
