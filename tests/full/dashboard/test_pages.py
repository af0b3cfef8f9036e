"""Every page of the dashboard, as its server answers it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.sample_log import make
from tests.helpers.handmade import finished, unit, write
from tests.helpers.pages import Seen
from trinity_es.dashboard import pages
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.batch_cache import BatchCache
from trinity_es.dashboard.page_urls import batch_id_of, batch_ref, batch_url
from trinity_es.dashboard.pages.overview import curve, histogram
from trinity_es.dashboard.rendering import HERE
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.history.attempts import fold_timeline
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.reading.overview import Point
from trinity_es.projections.tables.read_models import projectors


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sample") / "log.sqlite")
    make(path, batches=12, tasks=60, payloads=False)
    return path


@pytest.fixture(scope="module")
def ended(sample: str) -> Iterator[TestClient]:
    with TestClient(create_app(sample), base_url="http://localhost") as made:
        yield made


def get(client: TestClient, path: str, status: int = 200) -> Seen:
    answer = client.get(path)
    assert answer.status_code == status, f"{path}: {answer.text[:2000]}"
    return Seen(answer.text)


# --- all of them ----------------------------------------------------------------------------------------------------
def test_every_entry_of_the_navigation_leads_to_a_page(ended: TestClient) -> None:
    keys = [entry.key for entry in pages.navigation()]
    assert len(keys) == len(set(keys)), "each key leads to one place"
    for entry in pages.navigation():
        seen = get(ended, entry.path)
        assert ("a", entry.path) in [(tag, a.get("href")) for tag, a in seen.elements if "aria-current" in a], entry


PATHS = ["/", "/batches", "/batches?sort=reward&order=up&state=finalized", "/events", "/events?kind=rare",
         "/batch?id=3", "/batch?id=3&sort=reward&state=finished&at=200", "/batch?id=10%2Fletters",
         "/nothing", "/batch?id=none"]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_asks_nothing_from_elsewhere_and_has_no_inline_script_or_style(ended: TestClient, path: str) -> None:
    for tag, attrs in Seen(ended.get(path).text).elements:
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, attrs)
            assert name != "style", (tag, attrs)
            if name in ("src", "href", "action", "hx-get"):
                assert value.startswith(("/", "#")), (tag, attrs)
                assert not value.startswith("//")
        assert tag not in ("style", "iframe", "base", "object")
        if tag == "script":
            assert attrs.get("src")


def test_static_files_are_whole_and_name_no_other_place(ended: TestClient) -> None:
    for path in (HERE / "static").rglob("*"):
        if path.is_file():
            answer = ended.get("/" + path.relative_to(HERE).as_posix())
            assert answer.content == path.read_bytes()
            if path.suffix in (".js", ".css") and path.parent.name != "vendor":
                assert not re.search(r"https?://", path.read_text()), path
    for library in ("htmx", "uplot"):
        assert (HERE / "static" / "vendor" / f"{library}.LICENSE").is_file()


@pytest.mark.parametrize("odd", [
    "page=-1", "page=99999999", "page=x", "page=%00", "sort=%3Cscript%3E", "order=", "at=x", "at=-5",
    "at=99999999999999999999", "before=0", "before=x", "id=3&id=4", "n=0", "first=x",
])
def test_odd_parameters_are_taken_for_what_is_meant_or_left_out(ended: TestClient, odd: str) -> None:
    for path in ("/", "/batches", "/events", "/batch", "/batch/asof", "/batch/steps"):
        assert ended.get(f"{path}?{'' if 'id=' in odd else 'id=3&'}{odd}").status_code == 200, path


# --- the overview and the lists -------------------------------------------------------------------------------------
def test_the_overview_of_a_run_that_goes_on_says_what_it_waits_for(tmp_path: Path) -> None:
    path = str(tmp_path / "log.sqlite")
    make(path, batches=2, tasks=8, payloads=False, alive=True)
    with TestClient(create_app(path), base_url="http://localhost") as client:
        seen = get(client, "/")
        assert "/batch?id=2" in seen.links()
        with open_log(path) as log:
            [why] = log.why_open()
        assert why.cause in ("running", "slow"), "nobody asked the system: it is not said to be silent"
        assert not why.stalled
        assert "stalled 0" in seen.text
        assert f"{why.settled} of {why.tasks}" in seen.text
        assert why.sentence[:25] in seen.text
        assert "Why it waits" in get(client, "/batch?id=2").text


def test_an_empty_log_says_how_to_begin(path: Path) -> None:
    write(path, [])
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        assert "trinity-es run CONFIG" in get(client, "/").text
        assert "No batch yet" in get(client, "/batches").text
        assert "No event yet" in get(client, "/events").text


def test_the_list_is_filtered_sorted_and_paged(ended: TestClient, sample: str, path: Path) -> None:
    def ids(path: str) -> list[str]:
        return [href for href in get(ended, path).links() if href.startswith("/batch?")]

    with open_log(sample) as log:
        best = log.batches(sort="reward", descending=True)
    assert ids("/batches?sort=reward") == [batch_url(b.batch_id) for b in best]
    assert ids("/batches?type=eval") == [batch_url("10/letters")]
    assert ids("/batches?state=aborted&type=eval") == []
    write(path, [(batch_stream(i), [ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1], tasks=[{}])])
                 for i in range(130)])
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        first, second = get(client, "/batches"), get(client, "/batches?page=2")
        assert "/batch?id=129" in first.links()
        assert "/batch?id=29" not in first.links()
        assert "/batch?id=29" in second.links()
        assert "1 of 2" in first.text


def test_events_are_all_there_page_by_page(ended: TestClient, sample: str) -> None:
    found: list[int] = []
    path: str | None = "/events"
    while path is not None:
        seen = get(ended, path)
        found += [int(str(a["data-key"])[1:]) for tag, a in seen.elements if tag == "tr" and "data-key" in a]
        path = next((a["href"] for _, a in seen.elements if a.get("rel") == "next"), None)
    with open_log(sample) as log:
        assert found == list(range(log.head().position, 0, -1))


# --- one batch ------------------------------------------------------------------------------------------------------
def test_a_batch_page_has_every_task_run_and_attempt(ended: TestClient, sample: str) -> None:
    with open_log(sample) as log:
        story = fold_timeline(log.events(3))
    found = [get(ended, f"/batch?id=3&page={n}") for n in (1, 2)]
    keys = [a["data-key"] for seen in found for tag, a in seen.elements if str(a.get("data-key", "")).startswith("t")]
    assert keys == [f"t{i}" for i in range(60)]
    cells = [a for seen in found for tag, a in seen.elements if tag == "rect" and str(a["class"]).startswith("c-q")]
    legends = 2 * 6
    assert len(cells) - legends == sum(len(t.done) for t in story.state.tasks)
    by_task = [t for seen in found for t in seen.texts if re.match(r"task \d+, runs? .* attempt", t)]
    attempts = sum(len(t.attempts) for t in story.tasks)
    assert len(by_task) == 3 * attempts, "once by its task, and on both pages by its runner"
    assert {f"/rollout?id=3&task={t}&run=0" for t in range(60)} <= {h for seen in found for h in seen.links()}


def test_a_mean_says_of_how_many_tasks_runs_are_missing_in_it(path: Path) -> None:
    history: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2, 2], tasks=[{}, {}], max_attempts=1),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0), unit(1)], model_version=0),
        finished(0, None),
        ev.AttemptFailed(task=1, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-1", incarnation=1,
                         kind="workflow", message="no", retry=False, seconds=0.5),
    ]
    state = fold(history)
    history.append(ev.BatchFinalized(result=batch_result(state)))
    write(path, [(batch_stream(1), history)])
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        for page in ("/batches", "/batch?id=1"):
            assert "0.667 (1 short)" in get(client, page).text


def test_the_state_as_of_each_event_is_the_replay_up_to_it(client: TestClient, hand: str) -> None:
    with open_log(hand) as log:
        for n, recorded in enumerate(log.events(3), 1):
            seen = get(client, f"/batch/asof?id=3&n={n}")
            state = log.replay(3, recorded.position)
            assert f"tasks settled {state.completed_task_count} of {state.expected_task_count}" in seen.text
            assert f"units with runners {len(state.flights)}" in seen.text
            assert f"failed attempts {state.failed_attempts}" in seen.text
            assert recorded.type in seen.text
            assert f"position {recorded.position}" in seen.text


def test_a_course_goes_on_where_it_was_and_steps_back(hand: str) -> None:
    courses = BatchCache()
    with open_log(hand) as log:
        with courses.of(log, "open") as course:
            assert (len(course.positions), course.timeline.tasks[0].state) == (2, "running")
        with EventLog.open(hand, durability="process", projectors=projectors()) as writer:
            dropped = ev.TaskDropped(tasks=[1], reason="enough")
            writer.append([Write(stream="batch/open", expected_version=2, events=[dropped])], commit_id="more")
        with courses.of(log, "open") as again:
            assert again is course
            assert [t.state for t in again.timeline.tasks] == ["running", "dropped"] if again.timeline else False
            assert again.positions.tolist() == [r.position for r in log.events("open")]
            for version in (3, 1, 2, 2, 3):
                state, recorded = again.state_at(log, version)
                assert recorded.version == version
                assert state == log.replay("open", recorded.position)
        with pytest.raises(BatchNotFound), courses.of(log, "none"):
            pass


def test_a_batch_of_thousands_of_tasks_stays_a_page(tmp_path: Path) -> None:
    path, tasks = tmp_path / "log.sqlite", 1200
    units = [ev.Unit(task=t, run_id_base=0, runs=1, attempt=1) for t in range(tasks)]
    many = [ev.AttemptFailed(task=t, run_id_base=0, failed_runs=[0], attempt=1, runner="r", incarnation=1, kind="infra",
                             message="m" * 200, retry=True, seconds=1.0) for t in range(tasks)]
    write(path, [(batch_stream(1), [ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1] * tasks,
                                                      tasks=[{}] * tasks, max_attempts=2)])])
    with EventLog.open(str(path), durability="process", projectors=projectors()) as log:
        dispatched = ev.TasksDispatched(runner="r", incarnation=1, units=units, model_version=0)
        log.append([Write(stream="batch/1", expected_version=1, events=[dispatched, *many])], commit_id="many")
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        for where in ("/batch?id=1", "/batch?id=1&page=24", "/batch/asof?id=1&n=1202", "/batch/steps?id=1&first=500"):
            assert len(client.get(where).text) < 400_000, where
        seen = get(client, "/batch/asof?id=1&n=1202")
        assert "tasks 1,152 to 1,199 of 1,200" in seen.text, "the part of the grid in which something happened"
        steps = [int(str(a["data-n"])) for tag, a in get(client, "/batch/steps?id=1&first=500").elements
                 if "data-n" in a]
        assert steps == list(range(500, 700))
        before = [int(str(a["data-n"])) for tag, a in get(client, "/batch/steps?id=1&before=500").elements
                  if "data-n" in a]
        assert before == list(range(300, 500))


@pytest.mark.parametrize("batch_id", [12, "12", "'12'", "a/../b", "?x=1&y#z", "<script>", "0/letters", "ä b", "-3", -3])
def test_every_id_has_an_address_of_its_own(path: Path, batch_id: BatchId) -> None:
    ids: list[BatchId] = [batch_id, *([12] if batch_id == "12" else ["12"] if batch_id == 12 else [])]
    write(path, [(batch_stream(i), [ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1] * (n + 1),
                                                      tasks=[{}] * (n + 1))]) for n, i in enumerate(ids)])
    with open_log(str(path)) as log:
        assert batch_id_of(log, batch_ref(batch_id)) == batch_id
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        assert "tasks settled 0 of 1 " in get(client, batch_url(batch_id)).text
        assert batch_url(batch_id) in get(client, "/batches").links()


# --- what comes from outside, and what goes wrong -------------------------------------------------------------------
def test_a_log_that_is_not_there_yet_is_a_page_and_comes_up(path: Path) -> None:
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        assert "No log yet" in get(client, "/", 503).text
        submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1], tasks=[{}])
        write(path, [(batch_stream(1), [submitted])])
        assert "/batch?id=1" in get(client, "/batches").links()


def test_what_is_no_log_is_a_page(path: Path) -> None:
    path.write_bytes(b"nonsense" * 1000)
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        assert "holds no log" in get(client, "/", 503).text


def test_a_dead_runs_file_is_not_changed_by_being_looked_at(sample: str) -> None:
    before = Path(sample).read_bytes()
    with TestClient(create_app(sample), base_url="http://localhost") as client:
        for path in PATHS:
            client.get(path)
    assert Path(sample).read_bytes() == before


def test_the_median_of_two_halves_lies_between_them() -> None:
    told = histogram([0.0, 0.0, 1.0, 1.0])
    assert told["median"] == 0.5


def test_a_step_of_several_batches_is_their_mean() -> None:
    points = [Point(batch_id=n, step=step, name="train", value=value)
              for n, (step, value) in enumerate([(1, 0.0), (1, 1.0), (2, 0.25)])]
    assert curve({"reward": points})["data"] == [[1, 2], [0.5, 0.25]]


def test_pages_of_a_large_open_batch_asked_again_read_what_is_new(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trinity_es.events.store.log

    make(str(path), batches=1, tasks=1200, payloads=False, dead=True)
    seen: list[int] = []

    def counted(row: Any) -> Any:
        made = real(row)
        seen.extend([made.position] if made.stream == "batch/1" else [])
        return made

    real = trinity_es.events.store.log.from_row
    # The overview shows the last 12 rare events, a batch's page 200 of all; the tail of the log reads each new one too.
    pages_of = {"/": 20, "/batch?id=1": 208, "/batch/asof?id=1&n=900": 8, "/rollouts?id=1": 8, "/rollouts": 8}
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        first = {page: client.get(page).text for page in pages_of}
        monkeypatch.setattr(trinity_es.events.store.log, "from_row", counted)
        write(path, [("batch/1", [ev.FinalizeFailed(error="the pipeline broke")])])
        for page, most in pages_of.items():
            seen.clear()
            assert client.get(page).status_code == 200
            assert len(seen) <= most, page
        asof = [first["/batch/asof?id=1&n=900"], client.get("/batch/asof?id=1&n=900").text]
        assert len({re.sub(r'total="\d+"|event 900 of [\d,]+', "", text) for text in asof}) == 1
        assert "the pipeline broke" in client.get("/batch?id=1").text
