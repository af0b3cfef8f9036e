"""Tasksets that are names: what a config may say of them, what a run that goes on reads, what stands in the log."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import trinity_es
from tests.helpers.handmade import cli, history, write
from trinity_es import Explorer
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.config.config import Config
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, TasksetError
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.reading.resume_point import ResumePoint, sources_of
from trinity_es.run.trainer_loop import TrainerProcess
from trinity_es.safe_text import summary
from trinity_es.tasksets import hub, reasoning_gym
from trinity_es.tasksets.taskset import Cursor, Taskset

COMMIT = "0123456789" * 4
HUB = {"name": "t", "path": "hub:people/letters", "split": "train"}
RECORDED = TasksetSource(taskset="t", is_eval=False, path="hub:people/letters", subset=None, split="train", asked=None,
                         revision=COMMIT, args="", rows=3, order="")


def config(*tasksets: dict[str, Any], folder: Path | None = None) -> Config:
    return Config.from_dict({
        "explorer": {"rollout_model": {"engine_type": "scripted"}},
        "buffer": {"explorer_input": {"tasksets": list(tasksets)}},
    }, folder=folder)


# --- the config -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("keys", "told"), [
    ({"path": "hub:people/letters"}, "has the path hub:people/letters and no split"),
    ({"path": "hub:a/b/c", "split": "x"}, "write a dataset of the hub as hub:owner/name"),
    ({"path": "hub:", "split": "x"}, "write a dataset of the hub as hub:owner/name"),
    ({"path": "reasoning_gym:"}, "without a family: write, say, reasoning_gym:leg_counting"),
    ({"path": "reasoning_gym:gcd", "split": "train"}, "remove it, and choose other tasks by args.seed"),
    ({"path": "a.jsonl", "revision": "v1"}, "has revision, which is only for a dataset of the hub"),
    ({"path": "reasoning_gym:gcd", "subset": "v1"}, "has subset, which is only for a dataset of the hub"),
    ({"path": "hub:people/letters", "split": "x", "args": {"size": 3}}, "has args, which only reasoning-gym takes"),
])
def test_keys_that_do_not_fit_the_path_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config({"name": "t", **keys})
    assert told in str(refused.value)


def test_a_path_that_is_a_name_stays_as_it_is_written(tmp_path: Path) -> None:
    made = config(HUB, {"name": "g", "path": "reasoning_gym:gcd"}, {"name": "f", "path": "a.jsonl"}, folder=tmp_path)
    paths = [taskset.path for taskset in made.buffer.explorer_input.tasksets]
    assert paths == ["hub:people/letters", "reasoning_gym:gcd", str(tmp_path / "a.jsonl")]
    assert Config.from_dict(made.to_dict()) == made


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TasksetError, match=r"pip install 'trinity-es\[datasets\]'"):
        Taskset(TasksetConfig.model_validate(HUB))
    with pytest.raises(TasksetError, match=r"pip install 'trinity-es\[reasoning-gym\]'"):
        Taskset(TasksetConfig(name="g", path="reasoning_gym:gcd"))


def test_a_hub_id_that_is_written_as_a_path_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match="a dataset of the Hugging Face hub is written hub:owner/name"):
        Taskset(TasksetConfig(name="t", path=str(tmp_path / "openai" / "gsm8k")))
    with pytest.raises(ConfigError, match="a dataset of the Hugging Face hub is written hub:owner/name"):
        config({"name": "t", "path": "openai/gsm8k"}, folder=tmp_path).check()


# --- what a run reads -------------------------------------------------------------------------------------------------
class Rows:
    """A split of the hub with three rows, at the commit that is asked for, or else at another one."""

    def __init__(self, config: TasksetConfig, recorded: TasksetSource | None = None) -> None:
        self.revision = recorded.revision if recorded else "f" * 40
        self.subset = (recorded and recorded.subset) or config.subset or "easy"

    def __len__(self) -> int:
        return 3

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{"prompt": f"{self.revision[0]} {row}"} for row in rows]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hub, "HubRows", Rows)
    return lambda recorded=None, **keys: Taskset(TasksetConfig.model_validate(HUB | keys), recorded=recorded)


def test_what_a_name_means_when_a_run_begins_is_its_source(opened: Any) -> None:
    assert opened().source == replace(RECORDED, revision="f" * 40, subset="easy")


@pytest.mark.parametrize(("began", "keys"), [
    ({}, {}), ({}, {"revision": COMMIT}), ({"asked": "v1"}, {"revision": "v1"}),
    ({"subset": "hard"}, {}), ({"subset": "hard"}, {"subset": "hard"}),
], ids=["the same", "the commit of its branch", "a tag", "its default subset", "its default subset by its name"])
def test_the_recorded_source_is_read_and_no_newer_one(opened: Any, began: dict[str, Any], keys: dict[str, Any]) -> None:
    recorded = replace(RECORDED, **began)
    taskset = opened(recorded, **keys)
    assert taskset.source == recorded
    assert taskset._file.subset == began.get("subset", "easy")
    assert [task.raw_task["prompt"] for task in taskset.all()] == ["0 0", "0 1", "0 2"]


@pytest.mark.parametrize(("began", "keys", "told"), [
    ({}, {"revision": "v2"},
     f"its revision is v2 in the config, but .* began with the main branch, which was commit {COMMIT}: put that value"),
    ({"asked": "v1"}, {}, "its revision is the main branch in the config"),
    ({}, {"path": "hub:people/words"}, "its path is hub:people/words in the config, .* began with hub:people/letters"),
    ({}, {"subset": "hard"}, "its subset is hard in the config, but .* began with None"),
    ({"subset": "hard"}, {"subset": "easy"}, "its subset is easy in the config, but .* began with hard"),
    ({}, {"split": "test"}, "its split is test in the config, but .* began with train"),
    ({}, {"path": "letters.jsonl", "split": None}, r"its path is letters\.jsonl in the config"),
    ({"rows": 4}, {}, f"has 3 rows, {COMMIT} here, but .* began with 4 rows, {COMMIT}"),
])
def test_a_source_that_changed_is_refused(opened: Any, began: dict[str, Any], keys: dict[str, Any], told: str) -> None:
    with pytest.raises(TasksetError, match=f"{told}.*, or start a new run under another `name`"):
        opened(replace(RECORDED, **began), **keys)


def test_a_run_that_began_with_a_file_does_not_go_on_with_a_dataset_of_the_hub(opened: Any) -> None:
    explorer = Explorer(config(HUB))
    tasksets = explorer.config.buffer.explorer_input.tasksets
    with pytest.raises(TasksetError, match=r"its path is hub:people/letters in the config, but .* began with a file"):
        explorer._open_tasksets(tasksets, ResumePoint(submitted=1), is_eval=False)
    [taskset] = explorer._open_tasksets(tasksets, ResumePoint(), is_eval=False)
    assert explorer.unrecorded == [taskset.source]
    explorer.unrecorded = []
    explorer._open_tasksets(tasksets, ResumePoint(submitted=1, sources={("t", False): RECORDED}), is_eval=False)
    assert explorer.unrecorded == []


def test_a_trainer_that_reads_another_commit_than_its_explorer_ends_and_says_so(opened: Any) -> None:
    trainer = TrainerProcess(config(HUB))
    trainer._open_tasksets(trainer.config.buffer.explorer_input.tasksets, ResumePoint(), is_eval=False)
    trainer._require_same_taskset(replace(RECORDED, revision="f" * 40, subset="easy"))
    with pytest.raises(TasksetError, match=rf"\) to {'f' * 40}, but its explorer to {COMMIT}: restart"):
        trainer._require_same_taskset(RECORDED)


# --- files ------------------------------------------------------------------------------------------------------------
ROWS = [{"prompt": f"row{i}"} for i in range(4)]


def of_file(
    folder: Path, rows: list[dict[str, str]] = ROWS, recorded: Any = None, is_eval: bool = False, **keys: Any
) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return Taskset(TasksetConfig(name="t", path=str(file), **keys), recorded=recorded, is_eval=is_eval)


SHUFFLED = {"shuffle": True, "seed": 1}


@pytest.mark.parametrize(("rows", "keys", "said"), [
    ([*ROWS, {"prompt": "row4"}], {}, r"has 5 rows, sha256:\w+ here, .* began with 4 rows, sha256:\w+: put the old"),
    (ROWS[:2], {}, "has 2 rows"), (ROWS[::-1], {}, "has 4 rows"),
    (ROWS, {"seed": 2}, 'its order is {"seed":2,"shuffle":true} in the config, .* with {"seed":1,"shuffle":true}: put'),
    (ROWS, {"shuffle": False}, "its order is that of the file in the config"),
    (ROWS, {"shuffle": False, "data_selector": {"selector_type": "random"}}, "its order is {.data_selector"),
])
def test_a_file_that_changed_or_another_order_is_refused(
    tmp_path: Path, rows: list[dict[str, str]], keys: dict[str, Any], said: str
) -> None:
    began = of_file(tmp_path, **SHUFFLED).source
    assert of_file(tmp_path, recorded=began, **SHUFFLED).source == began
    with pytest.raises(TasksetError, match=said):
        of_file(tmp_path, rows, began, **{**SHUFFLED, **keys})


def test_what_changes_no_row_is_no_change(tmp_path: Path) -> None:
    began = of_file(tmp_path).source
    (tmp_path / "moved").mkdir()
    for folder, keys in ((tmp_path / "moved", {}), (tmp_path, {"seed": 7}), (tmp_path, {"epochs": 3}),
                         (tmp_path, {"data_selector": {"selector_type": "sequential"}})):
        assert of_file(folder, recorded=began, **keys).source == began
    asked = of_file(tmp_path, is_eval=True, **SHUFFLED).source
    assert of_file(tmp_path, recorded=asked, is_eval=True).source == asked  # an eval reads each row once
    of_file(tmp_path, recorded=replace(began, order=None), **SHUFFLED)  # of a log that does not say
    with pytest.raises(TasksetError, match="has 3 rows"):
        of_file(tmp_path, ROWS[:3], asked, is_eval=True)


def run_of(folder: Path, rows: int, size: int, drop_last: bool, **keys: Any) -> Config:
    """A run that explores a file of so many rows, in steps of this size. `keys`: of the taskset, and `total_steps`."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"row{i}"}) for i in range(rows)))
    total, taskset = keys.pop("total_steps", None), {"name": "t", "path": str(folder / "rows.jsonl"), **keys}
    return Config.from_dict({
        "mode": "explore", "total_steps": total, "explorer": {"rollout_model": {"engine_type": "scripted"}},
        "run_dir": str(folder), "store": {"url": f"sqlite:///{folder}/log.sqlite"},
        "buffer": {"batch_size": size, "explorer_input": {"drop_last": drop_last, "tasksets": [taskset]}},
    })


@pytest.mark.parametrize(("epochs", "drop_last", "total", "last"), [
    (1, False, None, 3), (1, False, 50, 3), (1, True, 50, 2), (2, False, 50, 5), (2, False, 4, 4),
    (None, False, 50, 50), (None, False, None, None),
])
def test_what_ends_a_run_is_known_at_its_start(
    tmp_path: Path, epochs: int | None, drop_last: bool, total: int | None, last: int | None
) -> None:
    part = Explorer(run_of(tmp_path, 5, 2, drop_last, epochs=epochs, total_steps=total))
    try:
        assert part.locate()
        assert part.last_step == last
        assert bool(part.end_note()) == (total == 50 and last != 50)
    finally:
        part.release()


@pytest.mark.parametrize(("rows", "size", "epochs", "drop_last"), [
    (5, 2, 3, False), (5, 2, 3, True), (4, 2, 2, False), (3, 4, 2, False), (3, 4, 3, True), (1, 1, 2, False),
], ids=["an epoch is no multiple of a batch", "and the last is dropped", "steps that end with an epoch",
        "a batch is longer than an epoch", "and the last is dropped here too", "a row"])
def test_wherever_a_run_was_cut_off_it_goes_on_with_the_very_next_row(
    tmp_path: Path, rows: int, size: int, epochs: int, drop_last: bool
) -> None:
    """Others' trainers counted epochs in whole batches (OpenRLHF 1350), or took an epoch's end for the end (verl 5725).
    """
    config, log = run_of(tmp_path, rows, size, drop_last, epochs=epochs, shuffle=True), tmp_path / "log.sqlite"

    def steps(done: int) -> tuple[bool, list[tuple[list[int], Cursor]]]:
        """Return whether anything is left to do after so many steps, and the steps that are."""
        part, found = Explorer(config), list[tuple[list[int], Cursor]]()
        try:
            left = part.locate()
            assert part.step == done
            cursors = part.cursors
            while part.has_more(done + len(found), cursors):
                tasks, cursors = part.mix.read(cursors, size)
                found.append(([task.index["index"] for task in tasks], cursors["t"]))
            assert part.last_step == done + len(found)
        finally:
            part.release()
        return left, found

    _, whole = steps(0)
    read = [row for step, _ in whole for row in step]
    for epoch in range(epochs if not drop_last else len(read) // rows):
        assert sorted(read[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert len(read) == epochs * rows - (epochs * rows % size if drop_last else 0)
    write(log, [("system", [ev.CoordinatorStarted(epoch=1, pid=1, host="here", version="0")])])
    for number, (of_step, at) in enumerate(whole, start=1):
        write(log, [
            ("taskset/t", [ev.TasksetAdvanced(taskset="t", batch_id=number, epoch=at.epoch, offset=at.offset)]),
            (batch_stream(number), [ev.BatchSubmitted(
                batch_id=number, batch_type="train", repeat_times=[1] * len(of_step), tasks=[{}] * len(of_step))]),
        ])
        left, rest = steps(number)
        assert rest == whole[number:]
        assert left, "its last step is not generated yet"
    (tmp_path / "rows.jsonl").unlink()  # SpecForge 659 went on without it
    with pytest.raises(TasksetError, match=r"taskset t: \S+rows.jsonl can't be read \(No such file or directory\)"):
        steps(len(whole))


# --- the log ----------------------------------------------------------------------------------------------------------
def made_log(folder: Path) -> Path:
    """A run of a taskset of the hub, two of whose three rows were read, and an eval of reasoning-gym."""
    gym = replace(RECORDED, is_eval=True, path="reasoning_gym:gcd", split=None, revision="0.1.25", args='{"size":3}')
    path = folder / "log.sqlite"
    without_payloads = [(stream, events) for stream, events in history("0" * 64) if stream != "batch/3"]
    write(path, [
        ("system", [ev.SystemConfigured(config=config(HUB, folder=folder).masked())]), *without_payloads,
        ("tasksets", [ev.TasksetResolved(batch_id=3, source=RECORDED),
                      ev.TasksetResolved(batch_id="0/letters", source=gym)]),
        ("taskset/t", [ev.TasksetAdvanced(taskset="t", batch_id=3, epoch=0, offset=2)]),
    ])
    return path


def test_what_a_taskset_was_is_in_the_log(tmp_path: Path) -> None:
    with trinity_es.open_log(str(made_log(tmp_path))) as log:
        assert sources_of(log)["t", False] == RECORDED
        assert sources_of(log)["t", True].revision == "0.1.25"
        told = [summary(recorded.event) for recorded in log.read(stream="tasksets")]
    assert told == [f"t is hub:people/letters train at {COMMIT}, 3 rows",
                    't is reasoning_gym:gcd {"size":3} at 0.1.25, 3 rows']


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "huggingface_hub", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("command", [
    ["verify"], ["replay", "0/letters"], ["replay", "open", "--at", "9"], ["show", "open"], ["why", "open"],
    ["batches"], ["events"], ["runners"], ["prompts"], ["status"],
], ids=lambda command: command[0])
def test_j4_a_log_of_such_a_run_is_read_without_the_packages(tmp_path: Path, command: list[str]) -> None:
    done = cli(*command, "--log", made_log(tmp_path))
    answered_no = command[0] in ("status", "why")  # no system runs
    assert done.exit_code == (1 if answered_no else 0), done.output
    if command == ["events"]:
        assert f"t is hub:people/letters train at {COMMIT}" in done.output
    if command == ["prompts"]:
        assert "no batch ever held: 2" in done.output
    if command[0] in ("events", "prompts"):
        assert " of epoch 1" in done.output  # one word and one count for one thing
    if command[0] == "replay":
        assert f"trained in step   {'not trained' if 'open' in command else 'none: it is an eval'}\n" in done.output


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("page", ["/", "/batches", "/events", "/batch?id=0/letters"])
def test_j4_its_pages_are_shown_without_the_packages(tmp_path: Path, page: str) -> None:
    with TestClient(create_app(str(made_log(tmp_path))), base_url="http://localhost") as client:
        assert client.get(page).status_code == 200


def test_a_syntax_warning_of_reasoning_gym_s_imports_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text('NEVER = 1 is "a"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reasoning_gym._require_package().NEVER is False
    del sys.modules["reasoning_gym"]
