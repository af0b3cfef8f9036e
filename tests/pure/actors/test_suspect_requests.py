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
        RequestsInHand(tmp_path / "hands", "life").begin_request(request())  # and this process ends
    last = RequestsInHand(tmp_path / "hands", "life")
    with pytest.raises(RequestRefused, match=r"'abort'.*2 coordinators"):
        last.begin_request(request(id="another"))
    last.begin_request(request(1))
    last.end_turn()
    with pytest.raises(RequestRefused):
        RequestsInHand(tmp_path / "hands", "life").begin_request(request())
    RequestsInHand(tmp_path / "hands", "another start of the system").begin_request(request())


def test_one_that_was_done_well_is_forgiven_and_one_that_was_put_aside_is_not(tmp_path: Path) -> None:
    RequestsInHand(tmp_path / "hands").begin_request(request())
    second = RequestsInHand(tmp_path / "hands")
    second.begin_request(request())
    second.end_turn()
    RequestsInHand(tmp_path / "hands").begin_request(request())
    again = RequestsInHand(tmp_path / "hands")
    again.begin_request(request())
    again.suspend_request(request())  # something has to be read for it
    again.end_turn()
    again.begin_request(request())
    with pytest.raises(RequestRefused):
        RequestsInHand(tmp_path / "hands").begin_request(request())


def test_a_handler_that_says_why_it_ends_its_coordinator_is_refused_at_once(tmp_path: Path) -> None:
    one = RequestsInHand(tmp_path / "hands")
    one.begin_request(request())
    one.blame(request(), ValueError("boom"))
    with pytest.raises(RequestRefused, match="boom"):
        RequestsInHand(tmp_path / "hands").begin_request(request())


def test_a_pipeline_is_given_up_after_three_coordinators(tmp_path: Path) -> None:
    for _ in range(PIPELINE_DEATHS):
        RequestsInHand(tmp_path / "hands").begin_pipeline("batch 3")
    last = RequestsInHand(tmp_path / "hands")
    with pytest.raises(PipelineError, match="batch 3"):
        last.begin_pipeline("batch 3")
    last.begin_pipeline("batch 4")
    last.end_pipeline("batch 4")


def test_a_file_that_is_half_or_can_not_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "hands").write_bytes(b'{"life": "", "held": {"a"')
    RequestsInHand(tmp_path / "hands").begin_request(request())
    (tmp_path / "file").touch()
    RequestsInHand(tmp_path / "file" / "hands").begin_request(request())
