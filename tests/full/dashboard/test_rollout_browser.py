"""Rollouts in a real Chromium: tokens by pointer and keys, and a rollout that ends while one looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.browser import Browser, serving
from tests.helpers.handmade import finished, unit, write
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.tables.read_models import projectors

pytestmark = pytest.mark.browser

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
