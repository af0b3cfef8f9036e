"""A second fold of the stream `answers`, to compare the read model with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.projections.tables.serve_answers import AnswerState


def fold_answers(recorded: Iterable[Recorded]) -> dict[str, AnswerState]:
    """Return all answers by message id, in the order in which they were recorded."""
    state: dict[str, AnswerState] = {}
    for item in recorded:
        evolve_answers(state, item.event)
    return state


def evolve_answers(state: dict[str, AnswerState], event: ev.Event) -> None:
    match event:
        case ev.AnswersRecorded():
            for a in event.answers:
                state[a.message] = AnswerState(message=a.message, payload=a.payload, model_version=a.model_version)
        case ev.AnswersRewarded():
            for message in event.messages:
                state[message] = replace(state[message], reward=event.reward, task=event.task, run=event.run)
        case ev.AnswersDelivered():
            for message in event.messages:
                state[message] = replace(state[message], delivered=True)
