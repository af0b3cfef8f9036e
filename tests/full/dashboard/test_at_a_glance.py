"""What a tired person has to see at once: how the run is, in words that can be read, at times that can be placed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from benchmarks.sample_log import make
from tests.helpers.handmade import write
from tests.helpers.pages import Seen
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.rendering import HERE, zone
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import batch_stream
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors

LONG = "runner-" + "on-a-node-with-a-long-name." * 7 + "2"


@contextmanager
def showing(url: str) -> Iterator[TestClient]:
    with TestClient(create_app(url), base_url="http://localhost") as made:
        yield made


def said(client: TestClient, path: str) -> Seen:
    answer = client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.text[:2000]}"
    return Seen(answer.text)


def verdict(seen: Seen) -> str:
    """The state beside the name of the run, the first on the page."""
    states = [found for _, attrs in seen.elements if (found := attrs.get("class") or "").startswith("state s-")]
    return states[0].removeprefix("state s-")


def life(name: str, incarnation: int = 1) -> list[ev.Event]:
    return [ev.RunnerStarted(runner=name, incarnation=incarnation, pid=2, host="here", engine="vllm"),
            ev.RunnerReady(runner=name, incarnation=incarnation, places=8, model_version=0, load_seconds=1.0)]


@pytest.mark.parametrize(("how", "word"), [("dead", "gone"), ("alive", "running"), ("finished", "ended")])
def test_the_overview_says_first_how_the_run_is(tmp_path: Path, how: str, word: str) -> None:
    path = str(tmp_path / "log.sqlite")
    make(path, batches=3, tasks=8, payloads=False, alive=how == "alive", dead=how == "dead")
    with open_log(path) as log:
        name = next((x.runner for x in log.runner_lives() if x.ended_at is None), "runner-1")
    with showing(path) as client:
        seen = said(client, "/")
        assert verdict(seen) == word
        assert ("what to do: `trinity-es resume" in seen.text) == (how == "dead")
        assert ("s-gone" in client.get("/runners").text) == (how == "dead"), "no runner of a dead system is running"
        assert ("s-gone" in client.get(f"/runner?name={name}").text) == (how == "dead")
        assert ("waits trouble" in client.get("/batch?id=3").text) == (how == "dead")
        assert ("a second" in seen.text.split("weights")[0]) == (how == "alive"), "no speed where nothing runs"


def test_a_runner_that_does_not_serve_is_named_above_and_first_in_the_list(path: Path) -> None:
    names = [f"runner-{i}" for i in (0, 1, 2, 10)]
    dies = ev.RunnerLost(runner="runner-10", incarnation=1, reason="its process ended with signal 9")
    write(path, [(f"runner/{name}", [*life(name), *([dies] if name == "runner-10" else [])]) for name in names])
    with EventLog.open(str(path), durability="process", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", {"pid": 1, "host": "another", "admin": {"pid": 1, "started": 0.0}})
        log.append([Write(stream=batch_stream(1), expected_version=0, events=[
            ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1], tasks=[{}])])],
            commit_id="one", lease=lease)
    with showing(str(path)) as client:
        seen = said(client, "/")
        assert verdict(seen) == "unseen", "its processes are on another machine"
        assert "1 of 4 runners do not serve: runner-10 lost (its process ended with signal 9)" in seen.text
        listed = [a for a in seen.links() if a.startswith("/runner?")][:4]
        assert listed == [f"/runner?name={n}" for n in ("runner-10", "runner-0", "runner-1", "runner-2")]


def test_runners_are_sorted_by_what_is_asked_and_by_their_numbers(path: Path) -> None:
    lost = [ev.RunnerLost(runner="runner-2", incarnation=1, reason="x"), *life("runner-2", 2)]
    write(path, [(f"runner/{name}", [*life(name), *(lost if name == "runner-2" else [])])
                 for name in ("runner-1", "runner-10", "runner-2", LONG)])

    with showing(str(path)) as client:
        def rows(query: str) -> list[str]:
            found = said(client, f"/runners{query}").elements
            links = [a["href"] or "" for tag, a in found if tag == "a"]
            return [link.split("=")[1] for link in links if link.startswith("/runner?")]

        assert rows("") == ["runner-1", "runner-2", "runner-10", LONG]
        assert rows("?sort=runner&order=down") == [*reversed(rows(""))]
        assert rows("?sort=deaths&order=down")[0] == "runner-2"
        cut = next(a for tag, a in said(client, "/runners").elements if tag == "a" and LONG in (a["href"] or ""))
        assert cut["title"] == LONG, "what is cut is whole in the title"
        assert ("h1", {"title": LONG}) in said(client, f"/runner?name={LONG}").elements


def test_times_say_their_zone_and_a_chart_is_in_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "log.sqlite")
    make(path, batches=2, tasks=4, payloads=False)
    try:
        for name, told, seconds in (("IST-5:30", "UTC+05:30", 19800), ("UTC", "UTC", 0), ("EST5", "UTC-05:00", -18000)):
            monkeypatch.setenv("TZ", name)
            time.tzset()
            assert zone() == told
            with showing(path) as client:
                text = client.get("/").text
            assert f">{told}</span>" in text
            assert f"&#34;zone&#34;:{float(seconds)}" in text
    finally:
        monkeypatch.undo()
        time.tzset()


def test_compare_says_first_what_differs(tmp_path: Path) -> None:
    path = str(tmp_path / "log.sqlite")
    make(path, batches=3, tasks=8, payloads=False)
    with showing(path) as client:
        text = said(client, "/compare?id=1&id2=2").text
    assert re.search(r"They differ in \d of 8 tasks, the first is task \d ?; in ", text)


@pytest.mark.parametrize("path", ["/batches", "/events", "/rollouts", "/runners", "/runner?name=runner-1", "/weights",
                                  "/weights?version=1", "/compare", "/batch?id=1", "/rollouts?id=1", "/nothing"])
def test_titles_begin_alike(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    log = tmp_path_factory.getbasetemp() / "titles.sqlite"
    if not log.exists():
        make(str(log), batches=2, tasks=4, payloads=False)
    with showing(str(log)) as client:
        found = re.search("<title>(.*) · trinity-es</title>", client.get(path).text)
    assert found[1][0].isupper()


# --- colours --------------------------------------------------------------------------------------------------------
def _contrast(one: str, other: str) -> float:
    """WCAG 2.1."""
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = ("ink", "dim", "accent", "bad", "good-text", "gone-text")
GROUNDS = ("bg", "panel", "soft", "accent-soft", "gone-soft")


def test_every_colour_of_text_can_be_read_on_every_ground_in_both_themes() -> None:
    css = (HERE / "static" / "app.css").read_text()
    themes = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block)) for block in css.split("color-scheme:")]
    themes = [t for t in themes if "ink" in t]
    media = re.findall(r"@media screen and \(prefers-color-scheme: dark\) \{([^}]*)\}", css)
    assert len(media) == 1
    dark = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", media[0]))
    assert dark.items() <= themes[-1].items(), "dark by choice is dark by the system's"
    light = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", css.split("}")[0]))
    for theme in (light, dark):
        poor = {(text, ground): round(ratio, 2) for text in TEXTS for ground in GROUNDS
                if (ratio := _contrast(theme[text], theme[ground])) < 4.5}
        assert not poor
    for name in (css, (HERE / "static" / "rollouts.css").read_text()):
        said = set(re.findall(r"[;{ ]color: var\(--([a-z0-9-]+)\)", name))
        assert said <= {*TEXTS}, "text has no colour but these"
