"""Rollouts, runners, weights and comparisons, as the server shows them of a run that is made up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.sample_log import make
from tests.helpers.handmade import finished, unit, write
from trinity_es.dashboard import rollout_values
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.pages.compare import differences, read_side
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import RUNNER_LIFE
from trinity_es.projections.history.attempts import fold_timeline, select_runs
from trinity_es.projections.reading.log_reader import Log, open_log


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sample") / "log.sqlite")
    make(path, batches=30, tasks=8, runs=4, seed=3, keep=12)
    return path


@pytest.fixture(scope="module")
def sample(url: str) -> Iterator[TestClient]:
    with TestClient(create_app(url), base_url="http://localhost") as made:
        yield made


@pytest.fixture(scope="module")
def log(url: str) -> Iterator[Log]:
    with open_log(url) as opened:
        yield opened


def seen(client: TestClient, path: str, status: int = 200) -> str:
    """The text of a page as a person reads it, spaces as one."""
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text[-600:])
    body = re.sub(r"(?s)<(script|style|head).*?</\1>", "", answer.text)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def rows_of(client: TestClient, path: str) -> list[str]:
    return re.findall(r'data-href="(/rollout\?[^"]*)"', unescape(client.get(path).text))


def test_rollouts_are_sorted_by_reward_filtered_by_task_and_paged(sample: TestClient, log: Log) -> None:
    batch = fold_timeline(log.events(30))
    best = [f"/rollout?id=30&task={r.task}&run={r.run}" for r in select_runs(batch.rows, sort="reward")]
    assert rows_of(sample, "/rollouts?id=30") == best[:50]
    worst = rows_of(sample, "/rollouts?id=30&dir=up")
    assert worst[0] == f"/rollout?id=30&task={select_runs(batch.rows, descending=False)[0].task}" \
        f"&run={select_runs(batch.rows, descending=False)[0].run}"
    assert rows_of(sample, "/rollouts?id=30&task=2&sort=task") == [f"/rollout?id=30&task=2&run={r}" for r in range(4)]
    runs = sum(len(fold_timeline(log.events(b)).rows) for b in range(26, 31))  # the newest five
    every = [rows_of(sample, f"/rollouts?page={n}") for n in range(1, -(-runs // 50) + 1)]
    assert sum(map(len, every)) == runs
    assert len({path for page in every for path in page}) == sum(map(len, every))


def test_a_rollout_shows_text_tokens_reward_advantage_and_where_it_comes_from(sample: TestClient, log: Log) -> None:
    batch = fold_timeline(log.events(30))
    row = select_runs(batch.rows, sort="reward")[0]
    [found] = rollout_values.read_runs(log, batch, [row])
    [e] = found.experiences
    assert e.advantages is not None  # as the pipeline left it, not as the runner wrote it
    assert e.logprobs is not None
    text = seen(sample, f"/rollout?id=30&task={row.task}&run={row.run}")
    assert row.payload is not None
    for told in (
        e.prompt_text, e.response_text, e.eid.uid, row.payload.digest, "differences in the event itself",
        f"{e.reward:.4f}", f"{e.advantages[0]:.5g}", f"{row.runner} #{row.incarnation}, attempt {row.attempt}",
        f"position {row.dispatch_position:,}", f"position {row.finish_position:,}",
        f"trinity-es regenerate 30 {row.task} {row.run} --log",
        f"trinity-es replay 30 --at {row.finish_position} --log", str(e.eid.run),
    ):
        assert str(told) in text, told
    page = sample.get(f"/rollout?id=30&task={row.task}&run={row.run}").text
    titles = re.findall(r'<span class="t (?:m|u)[^"]*" title="([^"]*)"', page)
    response = e.tokens[e.prompt_length :].tolist()
    assert len(titles) == len(response)
    for title, token, logprob in zip(titles, response, e.logprobs.tolist(), strict=True):
        assert f"id {token} " in title
        assert f"logprob {logprob:.4f}" in title
    assert e.action_mask is not None
    assert page.count("masked out (") == 0
    assert sum("masked out" in t for t in titles) == int((~e.action_mask).sum())


def test_an_eval_and_a_freed_payload_say_so(sample: TestClient) -> None:
    assert "Experiences of evals are not kept" in seen(sample, "/rollout?id=30/letters&task=0&run=0")
    freed = seen(sample, "/rollout?id=1&task=0&run=0")
    assert "were freed" in freed
    assert "reward" in freed


def test_a_damaged_payload_is_told_in_words(tmp_path: Path) -> None:
    path = str(tmp_path / "log.sqlite")
    make(path, batches=1, tasks=2, runs=2)
    [folder] = tmp_path.glob("*.payloads")
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1] + b"!")
    with TestClient(create_app(path), base_url="http://localhost") as client:
        assert "was changed" in seen(client, "/rollout?id=1&task=0&run=0")


def experiences(*, steps: int, text: str) -> list[Experience]:
    return [
        Experience(
            eid={"batch": "open", "task": 0, "run": run, "step": step, "suffix": f"{run}{step}"}, tokens=list(b"ab"),
            prompt_length=1, reward=0.5, prompt_text="a", response_text=text,
            messages=[{"role": "user", "content": [{"type": "text", "text": "part one"}]},
                      {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
                      {"role": "tool", "content": "it rains"}],
        )
        for run in range(2) for step in range(steps)
    ]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[TestClient]:
    """A batch that goes on, whose first task took several turns, and one is a megabyte."""
    path = tmp_path / "log.sqlite"
    store = open_payloads(str(path))
    digest = store.put(Experience.serialize_many(experiences(steps=3, text="long " * 200_000 + "END")))
    store.close()
    done = finished(0, digest)
    runs = [ev.RunResult(run=r.run, metrics=r.metrics, experiences=3) for r in done.runs]
    three = ev.TaskFinished(
        task=0, run_id_base=0, attempt=1, runner="runner-1", incarnation=1, runs=runs, model_version=4,
        payload=ev.PayloadRef(digest=digest, first=0, count=6), model_version_end=5, seconds=1.25,
    )
    write(path, [(batch_stream("open"), [
        ev.BatchSubmitted(batch_id="open", batch_type="train", repeat_times=[2, 2], tasks=[{}, {"workflow": "mine"}]),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0), unit(1)], model_version=4), three,
    ])])
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        yield client


def test_each_turn_of_a_run_is_shown_with_its_conversation(running: TestClient) -> None:
    text = seen(running, "/rollout?id=open&task=0&run=1&step=2")
    assert "open/0/1/2/12" in text
    assert all(told in text for told in ("step 0", "step 1", "step 2", "part one", "tool_calls", "it rains"))


def test_a_long_text_is_cut_on_the_page_and_whole_in_a_file(running: TestClient) -> None:
    page = running.get("/rollout?id=open&task=0&run=0")
    assert len(page.text) < 100_000
    link = re.search(r'href="(/rollout\.txt[^"]*)"', page.text)
    assert link is not None
    assert "more characters" in page.text
    whole = running.get(unescape(link[1]))
    assert "long long END" in whole.text
    assert "END" not in page.text
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["content-disposition"].startswith("attachment; ")
    assert whole.headers["x-content-type-options"] == "nosniff"


def test_a_run_that_has_not_ended_is_a_page_that_waits_for_it(running: TestClient) -> None:
    assert "This run has not ended" in seen(running, "/rollout?id=open&task=1&run=0")
    assert "batch/open" in unescape(running.get("/rollout?id=open&task=1&run=0").text).partition("data-watch=")[2][:40]
    assert running.get("/rollout.txt?id=open&task=1&run=0").status_code == 404


def test_a_runner_shows_its_lives_what_they_cost_its_weights_and_what_it_ran(sample: TestClient, log: Log) -> None:
    lives = log.runner_lives()
    died = next(life for life in lives if life.how == "lost" and life.attempts_lost)
    listed = seen(sample, "/runners")
    text = seen(sample, f"/runner?name={died.runner}")
    own = [life for life in lives if life.runner == died.runner]
    for life in own:
        assert life.reason in text
        assert f"{life.seconds_lost:,.1f}" in text
    assert f"{sum(life.seconds_lost for life in own):,.1f}" in listed
    assert "its process ended with signal 9" in text
    one = seen(sample, f"/runner?name={died.runner}&life={died.incarnation}")
    loaded = [r.event.version for r in log.read(stream=f"runner/{died.runner}", types=["WeightsLoaded"])
              if r.event.incarnation == died.incarnation]  # type: ignore[attr-defined]  # only WeightsLoaded are read
    assert all(f"version {v} after" in one for v in loaded[-5:])
    its_own = [r.position for r in log.read(stream=f"runner/{died.runner}", types=(*RUNNER_LIFE, "WeightsFailed"))
               if r.event.incarnation == died.incarnation]  # type: ignore[attr-defined]  # each of these has one
    shown = [p.replace(",", "") for p in re.findall(r" ([\d,]+) \S+ \S+ (?:Runner[A-Z]\w+|WeightsFailed) ", one)]
    assert list(map(int, shown)) == its_own[::-1], "a life's page lists another's events, or in another order"


def test_weights_count_what_each_version_made_of_what_was_delivered(sample: TestClient, log: Log) -> None:
    made: dict[int, int] = {}
    for recorded in log.read_rare(["BatchFinalized"]):
        for count, version in recorded.event.model_versions:  # type: ignore[attr-defined]  # only BatchFinalized are read
            made[version] = made.get(version, 0) + count
    trained = [fold_timeline(log.events(row.batch_id)) for row in log.batches(batch_type="train")]
    assert sum(made.values()) == sum(ref.count for batch in trained for ref in batch.state.experiences)
    version = max(made, key=lambda v: (made[v], v))
    [load, *_] = next(v for v in log.weights() if v.version == version).loads
    text = seen(sample, f"/weights?version={version}")
    assert f"experiences delivered {made[version]}" in text
    assert load.runner in text
    assert "loaded it" in text
    page = sample.get("/weights").text
    assert re.search(rf'data-key="v{version}">.*?<td class="r strong">{made[version]}</td>', page, re.DOTALL)


def test_two_moments_of_a_batch_are_compared(log: Log) -> None:
    row = log.batch_row(30)
    middle = (row.first_position + row.last_position) // 2
    now, then = read_side(log, 30), read_side(log, 30, middle)
    assert not differences(now, now)
    assert now.timeline.state == log.replay(30)
    assert then.timeline.state == log.replay(30, middle)
    assert differences(then, now)


def test_a_batch_is_compared_with_one_of_another_log(url: str, tmp_path: Path) -> None:
    again, different = str(tmp_path / "again.sqlite"), str(tmp_path / "different.sqlite")
    make(again, batches=2, tasks=8, runs=4, seed=3, payloads=False)
    make(different, batches=2, tasks=8, runs=4, seed=4, payloads=False)
    for other, verdict in ((again, "They are equal"), (different, "They differ")):
        with TestClient(create_app(url, other=other), base_url="http://localhost") as client:
            text = seen(client, "/compare?id=1")
            assert verdict in text
            assert "of the other log" in text
            assert "They are equal" in seen(client, "/compare?id=1&in=this")
    with TestClient(create_app(url, other=str(tmp_path / "none")), base_url="http://localhost") as client:
        assert "These can't be compared" in seen(client, "/compare?id=1")


@pytest.mark.parametrize("path", [
    "/rollouts?page=x&task=&sort=;&type=%00", "/rollout?id=30&task=-1&run=1e9", "/weights?version=-3",
    "/runner?name=runner-0&life=x&page=-1", "/compare?at=%00&id=%0a",
])
def test_an_odd_address_is_no_fault_of_the_page(sample: TestClient, path: str) -> None:
    answer: Any = sample.get(path)
    assert answer.status_code in (200, 404)
