"""`why` where engines are servers that others run: one that is not there, one that was taken away, the last one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.story import Story, configured, status
from trinity_es.events import vocabulary as ev

URL = "http://gpu-7:8000"


def of_servers() -> Story:
    return Story().add("system", configured(rollout_model={"engine_type": "http"}))


def server(runner: str = "runner-0", url: str = URL, *, wanted: bool = True) -> dict[str, Any]:
    return {"runner": runner, "url": url, "wanted": wanted}


def test_a_runner_whose_server_is_not_there_says_which_and_why_and_what_to_do() -> None:
    started = ev.RunnerStarted(runner="runner-0", incarnation=2, pid=1, host="here", engine="http")
    story = of_servers().batch().add("runner/runner-0", started)
    row = {"state": "started", "incarnation": 2, "waits_for": f"{URL} does not answer (ConnectError)"}
    told = story.why(62, live=status(row, servers=[server()]), system={"up": True})
    assert told.cause == "server"
    assert told.sentence.endswith(
        f"runner-0 #2 waits to start its engine, for 62 s now: {URL} does not answer (ConnectError)"
    )
    way = f"start or fix the server {URL}, or remove it: `trinity-es scale CONFIG --remove {URL}`"
    assert f"what to do: {way}" in str(told)


def test_where_the_last_server_was_taken_away_a_server_is_to_be_added() -> None:
    story = of_servers().runner().batch().add("runner/runner-0", ev.RunnerRetired(runner="runner-0", incarnation=1))
    coordinator = [{"name": "coordinator", "state": "up", "incarnation": 1}]
    live = status({"state": "retired"}, servers=[], children=coordinator)
    for told in (story.why(5, live=live, system={"up": True}), story.why(5)):
        assert (told.cause, told.stalled) == ("no_server", True)
        assert told.sentence.endswith("without a runner: there is no server any more")
        assert "what to do: `trinity-es scale CONFIG --add URL`" in str(told)
        assert "trinity-es up" not in str(told)


@pytest.mark.parametrize("left", [{"state": "retired"}, {"state": "ready"}])
def test_a_server_that_was_taken_away_is_nothing_to_wait_for_while_others_serve(left: dict[str, str]) -> None:
    story = of_servers().runner().runner("runner-1").batch(tasks=9)
    story.dispatch(*range(8), runner="runner-1")
    live = status(left, {"runner": "runner-1"}, servers=[server(wanted=False), server("runner-1", "http://b:1")])
    told = story.why(5, live=live, system={"up": True})
    assert [w.cause for w in told.waiting if w.cause != "running"] == ["places"]


def test_before_any_server_is_listed_there_is_none_yet() -> None:
    live = status(servers=[]) | {"runners": []}
    live["system"] = {"children": [{"name": "coordinator", "state": "up"}]}
    told = of_servers().batch().why(5, live=live, system={"up": True})
    assert told.sentence.endswith("there is no server yet")
    live["server_list"] = "the list of servers (/l): it is no regular file"
    told = of_servers().batch().why(5, live=live, system={"up": True})
    assert told.sentence.endswith("there is no server yet; the list of servers (/l): it is no regular file")


def test_a_runner_that_is_not_started_again_is_brought_back_by_name_and_its_server_can_go() -> None:
    story = of_servers().runner().batch()
    gone = ev.RunnerQuarantined(runner="runner-0", incarnation=1, deaths=4, period_seconds=600.0, reason="it ended")
    story.add("runner/runner-0", gone)
    live = status({"state": "quarantined"}, servers=[server()])
    told = str(story.why(5, live=live, system={"up": True}))
    assert f"`trinity-es restart-runner runner-0`, or remove its server: `trinity-es scale CONFIG --remove {URL}`" \
        in told
    assert "trinity-es restart-runner runner-0`; nothing" in str(story.why(5)), "what is no server is not taken away"


REFUSAL = f"{URL} can't load weights. Start it with VLLM_SERVER_DEV_MODE=1 in its environment"


def test_a_runner_that_goes_on_with_older_weights_is_told_with_the_way_out_and_is_no_stall() -> None:
    story = of_servers().runner().batch()
    story.add("weights", ev.WeightsPublished(version=1, path="/1"))
    story.add("runner/runner-0", ev.WeightsFailed(runner="runner-0", incarnation=1, version=1, error=REFUSAL))
    story.dispatch(0)
    row = {"refused": REFUSAL, "model_version": 0}
    live = status(row, servers=[server()]) | {"weights_version": 1}
    for told in (story.why(5, live=live, system={"up": True}), story.why(5)):
        assert f"runner-0 #1 goes on with weights version 0: it can't load version 1: {REFUSAL}" in str(told)
        assert "what to do: fix what it names, or publish a newer version: it tries again by itself" in str(told)
        assert not told.stalled
    assert f"--remove {URL}" in str(story.why(5, live=live, system={"up": True}))


def test_a_runner_that_never_had_the_current_weights_holds_its_batch_up_until_a_person_mends_it() -> None:
    story = of_servers().runner().batch()
    story.add("weights", ev.WeightsPublished(version=1, path="/1"))
    story.add("runner/runner-0", ev.WeightsFailed(runner="runner-0", incarnation=1, version=1, error=REFUSAL))
    reason = f"it could not load weights 1: {REFUSAL}"
    story.add("runner/runner-0", ev.RunnerFailed(runner="runner-0", incarnation=1, reason=reason))
    told = story.why(5, live=status({"state": "failed", "reason": reason, "refused": REFUSAL}, servers=[server()])
                     | {"weights_version": 1}, system={"up": True})
    assert (told.cause, told.stalled) == ("refused", True)
    assert REFUSAL in told.sentence
    assert "publish a newer version: it tries again by itself" in str(told)
    assert "restart-runner" not in str(told)
