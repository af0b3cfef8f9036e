"""The dashboard in a real Chromium (D1): a run that ended, goes on, died; clicks, keys, and a server that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.sample_log import make
from tests.helpers.browser import Browser, live, serving
from tests.helpers.handmade import ROOT, finished, unit, write
from tests.helpers.servers import free_port
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import wait_until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sample") / "log.sqlite")
    make(path, batches=12, tasks=12, payloads=False)
    return path


@contextmanager
def writing(path: str) -> Iterator[EventLog]:
    with EventLog.open(path, durability="process", projectors=projectors()) as log:
        yield log


def append(log: EventLog, stream: str, *events: ev.Event) -> None:
    version = log.stream_version(stream)
    log.append([Write(stream=stream, expected_version=version, events=events)], commit_id=f"{stream}/{version}")


def submit(log: EventLog, batch: int) -> None:
    one = ev.BatchSubmitted(batch_id=batch, batch_type="train", repeat_times=[1], tasks=[{}])
    append(log, batch_stream(batch), one)


def visit(browser: Browser, url: str) -> None:
    browser.open(url)
    live(browser)


def positions(browser: Browser, css: str) -> list[int]:
    """The first cell of each row, which is a position."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
    return [int(text.replace(",", "")) for text in browser.driver.execute_script(script, css)]


def test_the_same_by_keyboard(browser: Browser, sample: str) -> None:
    with serving(sample) as dashboard:
        visit(browser, dashboard.url)
        browser.press("?")
        browser.wait(lambda: browser.all("dialog[open]"), "the help")
        browser.press("\ue00c", "g", "b")
        browser.wait(lambda: browser.path == "/batches", "the list of batches")
        browser.press("j", "j", "k")
        assert browser.text("tr.chosen td.id") == browser.text("tbody tr:first-child td.id")
        chosen = browser.text("tr.chosen td.id")
        browser.press("\ue007")
        browser.wait(lambda: browser.path == f"/batch?id={chosen}", "the chosen batch")
        browser.press("j", "\ue007")
        browser.wait(lambda: browser.path == f"/rollout?id={chosen}&task=0&run=0", "a rollout")
        browser.driver.back()
        browser.wait(lambda: browser.path == f"/batch?id={chosen}", "the batch again")
        browser.press("u")
        browser.wait(lambda: browser.path == "/batches", "up to the list")
        browser.press("g", "o")
        browser.wait(lambda: browser.path == "/", "the overview")
        before = browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        browser.press("t")
        after = browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert before != after, "t changes the theme"
        browser.press("t", "t")


def test_moving_along_a_batchs_events_shows_what_it_was_as_of_each(browser: Browser, hand: str) -> None:
    with serving(hand) as dashboard:
        visit(browser, f"{dashboard.url}/batch?id=3")
        for n, said in enumerate(["BatchSubmitted", "TasksDispatched", "AttemptFailed"], 1):
            browser.press("\ue014")
            browser.wait(lambda n=n: browser.all(f".asof[data-n='{n}']"), f"the state as of event {n}")
            assert said in browser.text(".asof h3")
            assert said in browser.text("#steps tr.now")
        assert "0 of 2" in browser.text(".asof .facts")
        assert len(browser.all(".asof .c-pending")) == 2, "the runs that failed wait again"
        assert len(browser.all(".asof .c-running")) == 2
        at = browser.path
        browser.press("\ue012")
        browser.wait(lambda: browser.all(".asof[data-n='2']"), "one back")
        assert len(browser.all(".asof .c-running")) == 4
        browser.click("#steps tr[data-n='6']")
        browser.wait(lambda: browser.all(".asof[data-n='6']"), "the event that was clicked")
        assert "2 of 2" in browser.text(".asof .facts")
        browser.open(dashboard.url + at)
        assert "AttemptFailed" in browser.text(".asof h3"), "the address of a moment leads to it"
        assert browser.complaints() == []


def test_a_run_that_goes_on_changes_the_page_without_a_reload(browser: Browser, hand: str) -> None:
    stream = batch_stream("open")
    with serving(hand) as dashboard, writing(hand) as log:
        visit(browser, f"{dashboard.url}/batch?id=open")
        browser.driver.execute_script("window.mark = 1")
        assert browser.text("#settled") == "0 of 2"
        browser.press("j", "j")
        assert browser.text("tr.chosen td.id") == "1"
        append(log, stream, finished(0, None))
        browser.wait(lambda: browser.text("#settled") == "1 of 2", "the first task to be settled on the page")
        append(log, stream, ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(1)], model_version=5))
        append(log, stream, finished(1, None))
        browser.wait(lambda: browser.text("#settled") == "2 of 2", "the second one")
        browser.wait(lambda: len(browser.all("#steps tr[data-n]")) == 5, "its events at the end of its history")
        assert browser.text("tr.chosen td.id") == "1", "the chosen row stays chosen"
        assert browser.text("#since") == "+3"
        browser.click("nav a[data-go=o]")
        live(browser)
        assert browser.text("#tasks-finished") == "5 of 6"
        submit(log, 9)
        browser.wait(lambda: browser.text("#tasks-finished") == "5 of 7", "a new batch on the overview")
        browser.driver.execute_script("window.mark = document.querySelector('#chart-reward canvas')")
        assert browser.all("#chart-reward[data-points='1']")
        metrics = {"rollout/reward/mean": 0.7}
        result = {"batch_id": 9, "batch_type": "train", "finished_task_count": 0, "metrics": metrics}
        append(log, batch_stream(9), ev.BatchFinalized(result=result))
        browser.wait(lambda: browser.all("#chart-reward[data-points='2']"), "the reward curve to grow")
        same = browser.driver.execute_script("return window.mark === document.querySelector('#chart-reward canvas')")
        assert same, "the chart is the same one, with another point"
        assert browser.complaints() == []


def test_a_token_opens_the_dashboard_and_is_seen_nowhere(browser: Browser, hand: str) -> None:
    token = "a-token-of-some-length"
    with serving(hand, token=token) as dashboard:
        browser.open(dashboard.url + "/batches")
        assert "a token is needed" in browser.text("h1")
        browser.driver.find_element("css selector", "input[name=token]").send_keys(token, "\ue007")
        browser.wait(lambda: browser.path == "/", "the overview")
        live(browser)
        browser.driver.delete_all_cookies()
        visit(browser, dashboard.entrance)
        assert browser.path == "/"
        browser.click("nav a[data-go=b]")
        browser.wait(lambda: browser.all("tbody a"), "the list of batches")
        assert token not in browser.driver.page_source
        assert browser.driver.execute_script("return document.cookie") == "", "no script can read it"


def _start(path: str, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "trinity_es", "dashboard", "--log", path, "--port", str(port), "--no-token"],
        cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    line = process.stdout.readline()
    assert line.startswith("dashboard at"), line + process.stdout.read()
    return process


def _end(process: subprocess.Popen[str], how: int) -> None:
    process.send_signal(how)
    assert process.wait(20) is not None
    process.stdout.close()


def test_a_dead_server_comes_back_and_no_event_is_missed(browser: Browser, hand: str) -> None:
    port = free_port()
    server = _start(hand, port)
    try:
        with writing(hand) as log:
            visit(browser, f"http://127.0.0.1:{port}/events")
            first = log.head().position
            assert positions(browser, "#live tbody tr td:first-child")[0] == first
            append(log, batch_stream("open"), finished(0, None))
            browser.wait(lambda: browser.text("#since") == "+1", "an event while the server lives")
            _end(server, signal.SIGKILL)
            browser.wait(lambda: browser.all(".dot.off"), "the page to say that the server is gone")
            for number in range(20, 50):
                submit(log, number)
            server = _start(hand, port)
            live(browser)
            submit(log, 99)
            browser.wait(lambda: browser.text("#since") == "+32", "every event to be counted")
            browser.wait(lambda: positions(browser, "#live tbody tr td:first-child")[:1] == [first + 32], "the newest")
            assert positions(browser, "#live tbody tr td:first-child") == list(range(first + 32, 0, -1))
    finally:
        if server.poll() is None:
            _end(server, signal.SIGTERM)


def test_a_page_says_that_the_next_server_asks_for_another_token(browser: Browser, hand: str) -> None:
    with serving(hand, token=None) as first:
        browser.open(first.entrance)
        visit(browser, f"{first.url}/batch?id=3")
        port = int(first.url.rpartition(":")[2])
    browser.wait(lambda: browser.all(".dot.off"), "the page to say that the server is gone")
    with serving(hand, token=None, port=port) as second:
        browser.wait(lambda: "a token is needed" in browser.text("h1"), "the page to ask for the token")
        visit(browser, second.entrance)


@pytest.mark.parametrize("opened", ["before the log went", "after it"])
def test_what_was_wrong_before_a_server_died_is_over_with_the_next(browser: Browser, hand: str, opened: str) -> None:
    there, away = Path(hand), Path(hand).with_name("away")
    with serving(hand) as dashboard:
        port = int(dashboard.url.rpartition(":")[2])
        visit(browser, f"{dashboard.url}/batches")
        there.rename(away)
        browser.wait(lambda: "there is no log" in browser.text("#notice"), "the notice that the log is gone")
        if opened == "after it":
            browser.open(f"{dashboard.url}/batches")
            browser.wait(lambda: browser.all("#live[data-again]"), "a page that says it can't be shown")
    browser.wait(lambda: browser.all(".dot.off"), "the page to say that the server is gone")
    assert "there is no log" in browser.text("#notice")
    away.rename(there)
    with serving(hand, port=port):
        live(browser)
        browser.wait(lambda: browser.all("#notice[hidden]"), "the notice to go")
        browser.wait(lambda: len(browser.all("tbody tr")) == 4, "the batches")


def test_what_waits_is_asked_for_again_while_nothing_happens_and_what_ended_is_not(browser: Browser, hand: str) -> None:
    hasty = """
        const every = setInterval;
        window.ticks = 0;
        window.setInterval = (f, wait) => every(() => { window.ticks++; f(); }, wait / 50);
    """
    asked = "return performance.getEntriesByType('resource').filter(e => e.initiatorType === 'xmlhttprequest').length"
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": hasty})
    try:
        with serving(hand) as dashboard:
            visit(browser, dashboard.url)
            told = browser.text(".opens")
            assert "open" in told
            browser.wait(lambda: browser.text(".opens") not in ("", told), "the batch to be quiet for a while longer")
            visit(browser, f"{dashboard.url}/batch?id=open")
            assert browser.text(".waits")
            browser.wait(lambda: browser.driver.execute_script(asked) > 1, "the page to ask what it waits for now")
            assert browser.text("#since") == "", "no event came"
            visit(browser, f"{dashboard.url}/batch?id=3")
            browser.wait(lambda: browser.driver.execute_script("return ticks") > 5, "some turns of the clock")
            assert browser.driver.execute_script(asked) == 0
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_dead_runs_file_and_one_that_goes_away(browser: Browser, tmp_path: Path, path: Path) -> None:
    make(str(path), batches=3, tasks=8, payloads=False, dead=True)
    with serving(str(path)) as dashboard:
        visit(browser, dashboard.url)
        assert "no actor system runs on this store" in browser.text("table.opens")
        browser.click("table.opens td.id a")
        browser.wait(lambda: browser.path == "/batch?id=3", "the batch that was open")
        assert "trinity-es resume" in browser.text(".waits")
        moved = [(p, p.with_name(p.name + "-away")) for p in tmp_path.glob("log.sqlite*") if p.is_file()]
        for there, away in moved:
            there.rename(away)
        browser.wait(lambda: "there is no log" in browser.text("#notice"), "the notice that the log is gone")
        for there, away in moved:
            away.rename(there)
        browser.wait(lambda: not browser.text("#notice"), "the notice to go")
        assert wait_until(lambda: browser.text("#settled"), what="the page to stand", timeout=10)


RIGHT, LEFT = "\ue014", "\ue012"


def payload(path: Path) -> str:
    store = open_payloads(str(path))
    try:
        return store.put(Experience.serialize_many([
            Experience(
                eid={"batch": 7, "task": 0, "run": run, "suffix": f"{run}"}, tokens=list(b"ask:yes"), prompt_length=4,
                logprobs=[-0.01, -2.5, -7.0], action_mask=[True, True, False], prompt_text="ask:", response_text="yes",
                reward=0.5, info={"version_spans": [[4, 0, 2], [5, 2, 3]]},
            )
            for run in range(2)
        ]))
    finally:
        store.close()


def test_a_rollout_comes_up_when_it_ends_and_its_tokens_are_walked_by_keys(browser: Browser, tmp_path: Path) -> None:
    path, stream = tmp_path / "log.sqlite", batch_stream(7)
    write(path, [(stream, [
        ev.BatchSubmitted(batch_id=7, batch_type="train", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=4),
    ])])
    with serving(str(path)) as dashboard:
        browser.open(f"{dashboard.url}/rollout?id=7&task=0&run=1")
        browser.wait(lambda: "This run has not ended" in browser.text("#live"), "the page to say that the run goes on")
        browser.wait(lambda: browser.all(".dot.on"), "the page to be live")
        with EventLog.open(str(path), projectors=projectors()) as log:
            log.append([Write(stream=stream, expected_version=2, events=[finished(0, payload(path))])], commit_id="end")
        browser.wait(lambda: "ask:" in browser.text(".panels pre.text"), "the rollout to come up by itself")

        tokens = browser.all("[data-tokens] .t")
        assert [t.text for t in tokens] == list("ask:yes")
        colours = [t.value_of_css_property("box-shadow") for t in tokens[4:]]
        grounds = [t.value_of_css_property("background-image") != "none" for t in tokens[4:]]
        assert len(set(colours)) > 1, "likely and unlikely tokens look the same"
        assert grounds == [False, False, True], "what is masked out does not stand on another ground"
        browser.driver.execute_script("document.querySelector('[data-tokens]').focus()")
        for _ in range(5):
            browser.press(RIGHT)
        said = browser.text("#token-said")
        assert '"e"' in said
        assert "logprob -2.5000 (8.21 %)" in said
        assert "weights 4" in said
        browser.press(RIGHT)
        assert "masked out · weights 5" in browser.text("#token-said")
        browser.press(LEFT)
        assert browser.text("#token-said") == said
        browser.press("u")
        browser.wait(lambda: browser.path.startswith("/rollouts?id=7"), "u to lead up to the rollouts of the batch")
        browser.press("j", "\ue007")
        browser.wait(lambda: browser.path.startswith("/rollout?id=7"), "j and enter to lead into a rollout")
        assert browser.complaints() == []
