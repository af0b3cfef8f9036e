"""Tasksets from a stand-in hub by the real `datasets`: the log's commit is read, or nothing, whatever changes
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers.client_packages import DATASETS, installed
from tests.helpers.hub_stand_in import Hub, Repository, hub
from tests.helpers.paths import ROOT
from tests.helpers.prompts import prompts_used
from tests.helpers.runs import ROWS, command, events_of, finish, kill_run, make_config
from tests.helpers.servers import free_port
from tests.helpers.taskset_reader import TasksetReader
from trinity_es.config.config import load_config
from trinity_es.events.values import BatchId
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory, served: Hub) -> dict[str, str]:
    """How processes find the packages, the hub and their cache."""
    folder = installed(*DATASETS, beside=True)["PYTHONPATH"]
    return {
        "PYTHONPATH": os.pathsep.join((str(ROOT), folder)), "HF_ENDPOINT": served.url,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


@pytest.fixture(scope="module")
def readers(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TasksetReader]]:
    """A process with the hub, one that is told to be offline, and one whose hub does not answer; all of one cache."""
    folder, script = tmp_path_factory.mktemp("readers"), Path(__file__).parent / "open_taskset.py"
    more = {"online": {}, "offline": {"HF_HUB_OFFLINE": "1"}, "no network": {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}}
    made = {name: TasksetReader(script, variables | given, folder / name) for name, given in more.items()}
    yield made
    for reader in made.values():
        reader.close()


class Dataset:
    """A dataset of the hub, and how it is opened."""

    def __init__(self, repository: Repository, readers: dict[str, TasksetReader]) -> None:
        self.repository, self.push, self.push_rows = repository, repository.push, repository.push_rows
        self.path, self._readers = f"hub:{repository.name}", readers

    def open(self, how: str = "online", **given: Any) -> Any:
        return self._readers[how].open(**{"name": "t", "path": self.path, "split": "train", **given})

    def prompts(self, how: str = "online", **given: Any) -> tuple[str, list[str]]:
        told = self.open(how, **given)
        assert "error" not in told, told
        return told["source"]["revision"], [task["raw_task"]["prompt"] for task in told["tasks"]]


@pytest.fixture
def dataset(served: Hub, readers: dict[str, TasksetReader]) -> Dataset:
    return Dataset(served.repository(f"people/myLetters-{len(served.repositories)}"), readers)


def rows(text: str, n: int = 3) -> list[dict[str, Any]]:
    return [{"prompt": f"{text} {i}", "answer": "x", "level": i} for i in range(n)]


WITHOUT = pytest.mark.parametrize("how", ["offline", "no network"])


# --- which commit -----------------------------------------------------------------------------------------------------
def test_a_revision_is_resolved_when_a_run_begins_and_its_commit_is_read_from_then_on(dataset: Dataset) -> None:
    first = dataset.push_rows(train=rows("old"), test=rows("test"))
    told = dataset.open()
    assert told["source"] == {
        "taskset": "t", "is_eval": False, "path": dataset.path, "subset": "default", "split": "train", "asked": None,
        "revision": first, "args": "", "rows": 3, "order": "",
    }
    assert told["tasks"][1]["raw_task"] == {"prompt": "old 1", "answer": "x", "level": 1}
    second = dataset.push_rows(train=rows("new"))
    assert dataset.prompts() == (second, ["new 0", "new 1", "new 2"])
    assert dataset.prompts(recorded=told["source"]) == (first, ["old 0", "old 1", "old 2"])


def test_branches_tags_and_commits_are_revisions(dataset: Dataset) -> None:
    first = dataset.push_rows(train=rows("old"))
    dataset.repository.branches["v1.0"] = first
    dataset.push_rows(train=rows("new"))
    assert dataset.prompts(revision="v1.0")[0] == first
    assert dataset.prompts(revision=first)[1][0] == "old 0"
    refused = dataset.open(revision="v2")["error"]
    assert f"{dataset.path} at v2: there is no such revision" in refused


def test_subsets_and_splits_are_chosen_and_those_that_are_not_there_are_named(dataset: Dataset) -> None:
    push_subsets(dataset)
    assert dataset.prompts(subset="hard")[1] == ["hard"]
    refused = dataset.open()["error"]
    assert "easy" in refused, "the only one in the cache is not chosen, as none is the default one"
    assert "check its subset and its split" in refused
    assert dataset.prompts(subset="easy")[1] == ["easy"]
    assert "check its subset and its split" in dataset.open(subset="none")["error"]
    refused = dataset.open(subset="hard", split="test")["error"]
    assert "test" in refused
    assert "check its subset and its split" in refused


def push_subsets(dataset: Dataset, default: str = "") -> None:
    """Push the subsets `easy` and `hard`, and say which is the default one."""
    card = yaml.safe_dump({"configs": [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}.jsonl"}],
         **({"default": True} if name == default else {})}
        for name in ("easy", "hard")
    ]})
    files = {f"{name}.jsonl": f'{{"prompt": "{name}"}}\n'.encode() for name in ("easy", "hard")}
    dataset.push(files | {"README.md": f"---\n{card}---\n".encode()})


def test_without_a_subset_it_is_the_default_one_whichever_the_cache_has(dataset: Dataset) -> None:
    push_subsets(dataset, default="easy")
    assert dataset.prompts(subset="hard")[1] == ["hard"]  # the only one in the cache now
    told = dataset.open()
    assert told["source"]["subset"] == "easy"
    assert told["tasks"][0]["raw_task"] == {"prompt": "easy"}
    asked = len(dataset.repository.asked)
    for how in ("online", "offline", "no network"):
        assert dataset.open(how, recorded=told["source"]) == told
        assert dataset.open(how, recorded=told["source"], subset="easy") == told
    assert len(dataset.repository.asked) == asked
    assert "its subset is hard in the config" in dataset.open(recorded=told["source"], subset="hard")["error"]


def test_a_dataset_that_is_not_there_or_has_no_prompts_is_named(dataset: Dataset) -> None:
    dataset.push_rows(train=[{"question": "q"}])
    assert "no prompt: the key 'prompt' is missing (there are: question)" in dataset.open()["error"]
    dataset.repository.gated = True
    assert "is gated: ask for access on its page, then set HF_TOKEN" in dataset.open()["error"]
    assert "hub:people/other at main: there is no such dataset" in dataset.open(path="hub:people/other")["error"]


# --- without the hub --------------------------------------------------------------------------------------------------
@WITHOUT
def test_without_the_hub_the_log_s_commit_is_read_though_the_cache_has_a_newer(dataset: Dataset, how: str) -> None:
    dataset.push_rows(train=rows("old"))
    told = dataset.open()
    dataset.push_rows(train=rows("new"))
    dataset.open()  # what `datasets` would take: the newest of the cache
    asked = len(dataset.repository.asked)
    again = dataset.open(how, recorded=told["source"])
    assert again == told
    assert len(dataset.repository.asked) == asked


@WITHOUT
def test_without_the_hub_a_run_begins_with_the_last_commit_that_the_cache_knows(dataset: Dataset, how: str) -> None:
    first = dataset.push_rows(train=rows("old"))
    dataset.open()
    assert dataset.prompts(how) == (first, ["old 0", "old 1", "old 2"])


@WITHOUT
def test_without_the_hub_the_only_subset_in_the_cache_is_taken_and_logged(dataset: Dataset, how: str) -> None:
    push_subsets(dataset, default="easy")
    dataset.open(subset="hard")
    told = dataset.open(how)
    assert told["source"]["subset"] == "hard"
    dataset.open(subset="easy")
    assert dataset.open(how, recorded=told["source"]) == told
    assert "error" in dataset.open("offline"), "which of the two is not known"


@WITHOUT
def test_what_is_not_in_the_cache_says_how_to_get_it_there(dataset: Dataset, how: str) -> None:
    dataset.push_rows(train=rows("old"))
    told = dataset.open()
    second = dataset.push_rows(train=rows("new"))
    why = "HF_HUB_OFFLINE is set" if how == "offline" else "the hub can't be reached"
    unknown = dataset.open(how, path="hub:people/other")["error"]
    assert "is not in the cache of this machine" in unknown
    assert why in unknown
    assert "datasets.load_dataset('people/other', revision='main')" in unknown
    assert "save_to_disk" in unknown
    elsewhere = dataset.open(how, recorded=told["source"] | {"revision": second})["error"]
    assert why in elsewhere
    assert second in elsewhere


# --- a run ----------------------------------------------------------------------------------------------------------
def hub_config(folder: Path, path_of_rows: str) -> Path:
    path = make_config(folder)
    data = yaml.safe_load(path.read_text())
    inputs = data["buffer"]["explorer_input"]
    inputs["tasksets"][0] |= {"path": path_of_rows, "split": "train"}
    inputs["eval_tasksets"][0] |= {"path": path_of_rows, "split": "test"}
    path.write_text(yaml.safe_dump(data))
    return path


def prompts(config: trinity_es.Config, batch_id: BatchId) -> set[str]:
    with trinity_es.open_log(config.store.url) as log:
        submitted = next(r.event for r in log.events(batch_id) if r.type == "BatchSubmitted")
        return {task["raw_task"]["prompt"].partition(" ")[0] for task in log.tasks_of(submitted)}


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_rows_that_it_began_with_though_the_branch_was_moved(
    served: Hub, variables: dict[str, str], tmp_path: Path
) -> None:
    dataset = served.repository("people/letters-of-a-run")
    commit = dataset.push_rows(train=rows("old", ROWS), test=rows("old", 4))
    path = hub_config(tmp_path / "run", f"hub:{dataset.name}")
    config = load_config(path)
    with command("run", path, cwd=tmp_path, **variables) as running:
        wait_until(lambda: _begun(config, running), "step 2 to be generated", timeout=120)
        assert running.poll() is None, running.communicate()
        kill_run(config, running)
    dataset.push_rows(train=rows("new", ROWS + 5), test=rows("new", 4))
    code, _, err = finish("run", path, "--set", "buffer.explorer_input.tasksets[0].revision=v2", cwd=tmp_path,
                          **variables)
    assert code == 2
    assert f"its revision is v2 in the config, but the run in this log began with the main branch, which was commit " \
           f"{commit}" in " ".join(err.split())
    code, _, err = finish("resume", path, cwd=tmp_path, **variables)
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
