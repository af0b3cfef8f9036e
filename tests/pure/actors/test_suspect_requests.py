"""What was in hand when a coordinator ended: refused after two such ends, a pipeline after three, forgiven if done."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_es.actors.commands import AbortBatch, CommandRequest
from trinity_es.actors.coordinator.suspect_requests import PIPELINE_DEATHS, REQUEST_DEATHS, RequestsInHand
from trinity_es.events.errors import PipelineError, RequestRefused


def request(number: int = 0, *, id: str = "r") -> CommandRequest[AbortBatch]:
    return CommandRequest(id, AbortBatch(batch_id=number, reason="why", keep_partial_results=False))


def test_a_request_is_refused_after_two_coordinators_that_ended_with_it_whoever_sends_it(tmp_path: Path) -> None:
    for _ in range(REQUEST_DEATHS):
        RequestsInHand(tmp_path / "hands", "life").take(request())  # and this process ends
    last = RequestsInHand(tmp_path / "hands", "life")
    with pytest.raises(RequestRefused, match=r"'abort'.*2 coordinators"):
        last.take(request(id="another"))
    last.take(request(1))
    last.end_turn()
    with pytest.raises(RequestRefused):
        RequestsInHand(tmp_path / "hands", "life").take(request())
    RequestsInHand(tmp_path / "hands", "another start of the system").take(request())


def test_one_that_was_done_well_is_forgiven_and_one_that_was_put_aside_is_not(tmp_path: Path) -> None:
    RequestsInHand(tmp_path / "hands").take(request())
    second = RequestsInHand(tmp_path / "hands")
    second.take(request())
    second.end_turn()
    RequestsInHand(tmp_path / "hands").take(request())
    again = RequestsInHand(tmp_path / "hands")
    again.take(request())
    again.put_aside(request())  # something has to be read for it
    again.end_turn()
    again.take(request())
    with pytest.raises(RequestRefused):
        RequestsInHand(tmp_path / "hands").take(request())


def test_a_handler_that_says_why_it_ends_its_coordinator_is_refused_at_once(tmp_path: Path) -> None:
    one = RequestsInHand(tmp_path / "hands")
    one.take(request())
    one.blame(request(), ValueError("boom"))
    with pytest.raises(RequestRefused, match="boom"):
        RequestsInHand(tmp_path / "hands").take(request())


def test_a_pipeline_is_given_up_after_three_coordinators(tmp_path: Path) -> None:
    for _ in range(PIPELINE_DEATHS):
        RequestsInHand(tmp_path / "hands").take_pipeline("batch 3")
    last = RequestsInHand(tmp_path / "hands")
    with pytest.raises(PipelineError, match="batch 3"):
        last.take_pipeline("batch 3")
    last.take_pipeline("batch 4")
    last.end_pipeline("batch 4")


def test_a_file_that_is_half_or_can_not_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "hands").write_bytes(b'{"life": "", "held": {"a"')
    RequestsInHand(tmp_path / "hands").take(request())
    (tmp_path / "file").touch()
    RequestsInHand(tmp_path / "file" / "hands").take(request())
