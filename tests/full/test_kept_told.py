"""Views say what a lost attempt had of its answers wherever its task, its run or its tokens are shown (promise 12)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.helpers.handmade import cli, finished, unit, write
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.journal import KeptAnswer, chunk, step
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.safe_text import summary

KEPT = "3,840 tokens of 1 whole answer and 1 partial answer, kept by runner-2 #1"
LOST = "; 60 tokens can't go on because of presence_penalty"


def lost(path: Path, *, ended: bool) -> Path:
    """A log in which task 0 was lost with runner-2 and goes on with runner-1; run 0 is spliced twice."""
    run = 3, "s", 0, 0
    record = b"".join([
        chunk(run, 0.5, "b", 0, 0, 0, KeptAnswer(tokens=[104] * 3, spans=[[4, 0, 3]], finish="stop", model="m")),
        step(run, 0.6, "pay ab12", 0, done=False), step(run, 0.8, "pay ab12", 0, done=True, value=1),
        chunk(run, 1.0, "c", 0, 0, 0, KeptAnswer(tokens=[104, 105], logprobs=[-0.1, -0.2], splices=[1], max_tokens=9)),
        chunk(run, 1.0, "c", 0, 1, 0, KeptAnswer(tokens=[104], max_tokens=9)),  # the other answer to this request
    ])
    journals = open_journals(str(path))
    journals.append(("runner-2", 1), 0, record, durable=True)
    journals.close()
    experiences = [
        Experience(tokens=list(b"1+1=hello"), prompt_length=4, logprobs=[-0.5] * 5, reward=0.5, eid=EID(3, 0, run),
                   response_text="hello", info={"splices": [2, 4]} if run == 0 else {"splices": "none of ours"})
        for run in range(2)
    ]
    store = open_payloads(str(path), durability="process")
    digest, kept = store.put(Experience.serialize_many(experiences)), store.put(record)
    store.close()
    who = {"runner": "runner-2", "incarnation": 1}
    write(path, [("batch/3", [
        ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[2], tasks=[{}], max_attempts=2),
        ev.TasksDispatched(**who, units=[unit(0)], model_version=4),
        ev.AttemptFailed(**who, task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, kind="runner_lost",
                         message="signal 9", retry=True, blamed=False),
        ev.AttemptKept(**who, task=0, run_id_base=0, runs=2, attempt=1, payload=kept, calls=1, open_calls=1,
                       tokens=3840, steps=0, seconds=12.0, not_kept={"presence_penalty": 60}),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0, 2)], model_version=5),
        *([finished(0, digest, attempt=2)] if ended else []),
    ])])
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return lost(tmp_path / "log.sqlite", ended=True)


def test_show_says_what_an_attempt_and_a_run_went_on_from(path: Path) -> None:
    assert f"runner-1 goes on from {KEPT}{LOST} → +" in cli("show", 3, "--log", path).stdout.replace("\n", "")
    assert f"the next attempt goes on from {KEPT}{LOST}" in cli("show", 3, "--task", 0, "--log", path).stdout
    run = cli("show", 3, "--task", 0, "--run", 0, "--log", path).stdout
    assert f"went on     from {KEPT}{LOST} (all 2 runs of its unit)\n" in run
    assert "spliced before response token 2, 4: there another attempt went on" in run
    assert "spliced" not in cli("show", 3, "--task", 0, "--run", 1, "--log", path).stdout
    document = json.loads(cli("show", 3, "--json", "--log", path).stdout)
    first, second = document["tasks"][0]["attempts"]
    assert (first["kept"], second["kept"]["tokens"], second["kept"]["runner"]) == (None, 3840, "runner-2")
    shown = json.loads(cli("show", 3, "--task", 0, "--run", 0, "--json", "--log", path).stdout)
    assert shown["run"]["kept"]["calls"] == 1
    with open_log(str(path)) as log:
        [told] = [summary(r.event) for r in log.events(3) if isinstance(r.event, ev.AttemptKept)]
    assert told == f"task 0 goes on from {KEPT}{LOST}"


def test_show_draws_the_attempts_of_a_task_with_their_answers_steps_and_splices(path: Path) -> None:
    drawn = cli("show", 3, "--task", 0, "--log", path).stdout
    lives = [line.split() for line in drawn.splitlines() if line.startswith("  attempt")]
    assert [(line[1], line[-3:]) for line in lives] == [
        ("1", ["runner-2", "#1:", "runner_lost"]), ("2", ["runner-1", "#1:", "finished"])]
    assert ("run 0 goes on from answer 3 tokens (stop) → step pay → 2 answers to one request (2/9 tokens (partial) "
            "spliced at 1; 1/9 tokens (partial))\n") in drawn
    document = json.loads(cli("show", 3, "--task", 0, "--json", "--log", path).stdout)
    first, second = document["attempts"]
    assert (first["parts"], second["kept"]["tokens"]) == ([], 3840)
    assert [(part["step"], part["finish"], part["tokens"], part["splices"]) for part in second["parts"]] == [
        ("", "stop", 3, []), ("pay", "done", 0, []), ("", "", 2, [1]), ("", "", 1, [])]
    assert all("kept" not in run for run in document["runs_made"])  # it is told once, with its attempt


def test_show_draws_attempts_whose_kept_answers_are_gone(path: Path) -> None:
    with open_log(str(path)) as log:
        [kept] = [r.event.payload for r in log.events(3) if isinstance(r.event, ev.AttemptKept)]
    store = open_payloads(str(path), durability="process")
    store.delete(kept)
    store.close()
    assert "attempt 2" in cli("show", 3, "--task", 0, "--log", path).stdout


def test_the_dashboard_marks_where_an_answer_was_spliced(path: Path) -> None:
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        page = client.get("/rollout?id=3&task=0&run=0").text
        other = client.get("/rollout?id=3&task=0&run=1").text
        batch = client.get("/batch?id=3").text
    spliced = [part.partition(">")[2][0] for part in page.split("<span ")
               if part.startswith('class="t ') and "another attempt goes on here" in part]
    assert spliced == ["l", "o"]  # hello: tokens 2 and 4 of the response
    assert "before token 6, 8" in page
    assert KEPT in page
    assert "goes on here" not in other
    assert f"goes on from {KEPT}" in batch


def test_the_page_of_an_open_run_says_from_what_it_goes_on(tmp_path: Path) -> None:
    path = lost(tmp_path / "log.sqlite", ended=False)
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        assert f"It goes on from {KEPT}" in client.get("/rollout?id=3&task=0&run=1").text


def test_a_trace_has_the_moment_from_which_a_task_goes_on(path: Path, tmp_path: Path) -> None:
    done = cli("export", "3", "--trace", tmp_path / "trace.json", "--log", path)
    assert done.exit_code == 0, done.output
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [told] = [entry["args"]["told"] for entry in entries if entry["name"] == "task 0 goes on"]
    assert KEPT in told


def test_promise_12_a_log_is_sound_without_its_journal_and_not_without_what_an_attempt_went_on_from(path: Path) -> None:
    shutil.rmtree(f"{path}.journals")
    sound = cli("verify", "--log", path)
    assert sound.exit_code == 0, sound.output
    assert "note" not in sound.stdout
    with open_log(str(path)) as log:
        [kept] = [r.event.payload for r in log.events(3) if isinstance(r.event, ev.AttemptKept)]
    store = open_payloads(str(path), durability="process")
    store.delete(kept)
    store.close()
    with open_log(str(path)) as log:
        [problem] = log.verify()
    assert f"payload {kept} is missing" in str(problem)
