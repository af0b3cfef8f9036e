"""Tasksets from the Hugging Face hub: the real `datasets` and `huggingface_hub`, against a stand-in of the hub.

A branch is moved while a run goes on, the hub is gone, the cache holds other commits: what is read is the commit in the
log, or nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers.client_packages import ask, installed
from tests.helpers.hub_stand_in import Hub, hub
from tests.helpers.paths import ROOT
from tests.helpers.runs import ROWS, command, events_of, finish, kill_run, make_config
from trinity_es.config.config import load_config
from trinity_es.events.values import BatchId
from trinity_es.projections.reading.resume_point import prompts_used
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(600)

DATASETS = ["datasets==5.2.0", "pandas==3.1.1", "python-dateutil==4.0.0", "pytz==2026.6", "multiprocess==0.70.19",
            "xxhash==4.1.0"]
"""The package, and what it imports that is not beside us already."""
REPOSITORY = "people/myLetters"
PATH = f"hub:{REPOSITORY}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packages")
    installed(folder, *DATASETS, beside=True)
    return os.pathsep.join((str(ROOT), str(folder)))


class Reader:
    """Opens tasksets in processes of their own, with one cache."""

    def __init__(self, packages: str, hub: Hub, home: Path) -> None:
        self.variables = {
            "PYTHONPATH": packages, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def open(self, *, recorded: Any = None, variables: dict[str, str] | None = None, **config: Any) -> Any:
        """The source and the tasks of a taskset, or its error."""
        script = Path(__file__).parent / "open_taskset.py"
        keys = {"name": "t", "path": PATH, "split": "train", **config}
        return ask(script, {**self.variables, **(variables or {})}, config=keys, recorded=recorded)

    def prompts(self, **given: Any) -> tuple[str, list[str]]:
        """The commit that was read, and its prompts."""
        told = self.open(**given)
        assert "error" not in told, told
        return told["source"]["revision"], [task["raw_task"]["prompt"] for task in told["tasks"]]


@pytest.fixture
def served() -> Iterator[Hub]:
    with hub(REPOSITORY) as made:
        yield made


@pytest.fixture
def reader(packages: str, served: Hub, tmp_path: Path) -> Reader:
    return Reader(packages, served, tmp_path / "hf")


def rows(text: str, n: int = 3) -> list[dict[str, Any]]:
    return [{"prompt": f"{text} {i}", "answer": "x", "level": i} for i in range(n)]


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def nobody() -> dict[str, str]:
    """The address of a hub that does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"HF_ENDPOINT": f"http://127.0.0.1:{free.getsockname()[1]}"}


# --- which commit -----------------------------------------------------------------------------------------------------
def test_a_revision_is_resolved_when_a_run_begins_and_its_commit_is_read_from_then_on(
    reader: Reader, served: Hub
) -> None:
    first = served.push_rows(train=rows("old"), test=rows("test"))
    told = reader.open()
    assert told["source"] == {
        "taskset": "t", "is_eval": False, "path": PATH, "subset": None, "split": "train", "asked": None,
        "revision": first, "args": "", "rows": 3,
    }
    assert told["tasks"][1]["raw_task"] == {"prompt": "old 1", "answer": "x", "level": 1}
    second = served.push_rows(train=rows("new"))
    assert reader.prompts() == (second, ["new 0", "new 1", "new 2"])
    assert reader.prompts(recorded=told["source"]) == (first, ["old 0", "old 1", "old 2"])


def test_branches_tags_and_commits_are_revisions(reader: Reader, served: Hub) -> None:
    first = served.push_rows(train=rows("old"))
    served.branches["v1.0"] = first
    served.push_rows(train=rows("new"))
    assert reader.prompts(revision="v1.0")[0] == first
    assert reader.prompts(revision=first)[1][0] == "old 0"
    refused = reader.open(revision="v2")["error"]
    assert f"{PATH} at v2: there is no such revision" in refused


def test_subsets_and_splits_are_chosen_and_those_that_are_not_there_are_named(reader: Reader, served: Hub) -> None:
    card = yaml.safe_dump({"configs": [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}.jsonl"}]} for name in ("easy", "hard")
    ]})
    files = {f"{name}.jsonl": f'{{"prompt": "{name}"}}\n'.encode() for name in ("easy", "hard")}
    served.push(files | {"README.md": f"---\n{card}---\n".encode()})
    assert reader.prompts(subset="hard")[1] == ["hard"]
    assert reader.prompts(subset="easy")[1] == ["easy"]
    assert "easy" in reader.open()["error"]
    assert "look at its subset and its split" in reader.open(subset="none")["error"]
    refused = reader.open(subset="hard", split="test")["error"]
    assert "test" in refused
    assert "look at its subset and its split" in refused


def test_a_dataset_that_is_not_there_or_has_no_prompts_is_named(reader: Reader, served: Hub) -> None:
    served.push_rows(train=[{"question": "q"}])
    assert "no prompt: the key 'prompt' is missing (there are: question)" in reader.open()["error"]
    assert "hub:people/other at main: there is no such dataset" in reader.open(path="hub:people/other")["error"]


# --- without the hub --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["offline", "no network"])
def test_without_the_hub_the_commit_of_the_log_is_read_from_the_cache_though_a_newer_one_is_there(
    reader: Reader, served: Hub, how: str
) -> None:
    served.push_rows(train=rows("old"))
    told = reader.open()
    served.push_rows(train=rows("new"))
    reader.open()  # what `datasets` would take: the newest of the cache
    asked = len(served.asked)
    without = OFFLINE if how == "offline" else nobody()
    again = reader.open(recorded=told["source"], variables=without)
    assert again == told
    assert len(served.asked) == asked


@pytest.mark.parametrize("how", ["offline", "no network"])
def test_without_the_hub_a_run_begins_with_the_last_commit_that_the_cache_knows(
    reader: Reader, served: Hub, how: str
) -> None:
    first = served.push_rows(train=rows("old"))
    reader.open()
    without = OFFLINE if how == "offline" else nobody()
    assert reader.prompts(variables=without) == (first, ["old 0", "old 1", "old 2"])


@pytest.mark.parametrize("how", ["offline", "no network"])
def test_what_is_not_in_the_cache_says_how_to_get_it_there(reader: Reader, served: Hub, how: str) -> None:
    first = served.push_rows(train=rows("old"))
    told = reader.open()
    second = served.push_rows(train=rows("new"))
    without, why = (OFFLINE, "HF_HUB_OFFLINE is set") if how == "offline" else (nobody(), "the hub can't be reached")
    unknown = reader.open(path="hub:people/other", variables=without)["error"]
    assert "is not in the cache of this machine" in unknown
    assert why in unknown
    assert "datasets.load_dataset('people/other', revision='main')" in unknown
    assert "save_to_disk" in unknown
    elsewhere = reader.open(recorded=told["source"] | {"revision": second}, variables=without)["error"]
    assert why in elsewhere, first
    assert second in elsewhere


# --- a run ----------------------------------------------------------------------------------------------------------
def hub_config(folder: Path, **taskset: Any) -> Path:
    path = make_config(folder)
    data = yaml.safe_load(path.read_text())
    inputs = data["buffer"]["explorer_input"]
    inputs["tasksets"][0] |= {"path": PATH, "split": "train", **taskset}
    inputs["eval_tasksets"][0] |= {"path": PATH, "split": "test"}
    path.write_text(yaml.safe_dump(data))
    return path


def prompts(config: trinity_es.Config, batch_id: BatchId) -> set[str]:
    with trinity_es.open_log(config.store.url) as log:
        submitted = next(r.event for r in log.events(batch_id) if r.type == "BatchSubmitted")
        return {task["raw_task"]["prompt"].partition(" ")[0] for task in log.tasks_of(submitted)}


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_rows_that_it_began_with_though_the_branch_was_moved(
    reader: Reader, served: Hub, tmp_path: Path
) -> None:
    commit = served.push_rows(train=rows("old", ROWS), test=rows("old", 4))
    path = hub_config(tmp_path / "run")
    config = load_config(path)
    with command("run", path, cwd=tmp_path, **reader.variables) as running:
        wait_until(lambda: _begun(config, running), "step 2 to be generated", timeout=120)
        assert running.poll() is None, running.communicate()
        kill_run(config, running)
    served.push_rows(train=rows("new", ROWS + 5), test=rows("new", 4))
    code, _, err = finish("run", path, "--set", "buffer.explorer_input.tasksets[0].revision=v2", cwd=tmp_path,
                          **reader.variables)
    assert code == 2
    assert f"its revision is v2 in the config, and the run in this log began with the main branch, which was commit " \
           f"{commit}" in " ".join(err.split())
    code, _, err = finish("resume", path, cwd=tmp_path, **reader.variables)
    assert code == 0, err
    found = [(e.source.taskset, e.source.is_eval, e.source.revision) for _, e in events_of(config, "TasksetResolved")]
    assert sorted(found) == [("check", True, commit), ("questions", False, commit)]
    with trinity_es.open_log(config.store.url) as log:
        assert log.verify() == []
        assert prompts_used(log, "questions") == dict.fromkeys(range(ROWS), 1)
        ids = [b.batch_id for b in log.batches()]
    assert {prompt for batch_id in ids for prompt in prompts(config, batch_id)} == {"old"}


def _begun(config: trinity_es.Config, running: Any) -> bool:
    return running.poll() is not None or any(s == "batch/2" for s, _ in events_of(config, "BatchFinalized"))
