"""Small logs of every released schema replay alike for ever. A new one: `python -m tests.pure.projections.test_golden
NAME`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.helpers.batches import live
from tests.helpers.paths import GOLDEN
from trinity_es.events import codec
from trinity_es.projections.batch import evolve
from trinity_es.projections.reading.log_reader import canonical

FILES = sorted(GOLDEN.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_promise_6_a_history_of_an_earlier_release_replays_to_the_same_states(file: Path) -> None:
    for case in orjson.loads(file.read_bytes()):
        state: Any = None
        for number, row in enumerate(case["events"]):
            event = codec.decode(row["type"], row["schema_version"], canonical(row["data"]))
            state = evolve(state, event)
            seen = [state.state.value, state.completed_task_count, len(state.pending), len(state.flights)]
            assert seen == row["state"], f"{file.name}: event {number} ({row['type']}) is the first that differs"
        assert canonical(state.final_result) == canonical(case["result"])


def test_there_is_a_golden_history() -> None:
    assert FILES


def record(name: str) -> None:
    cases = []
    for seed, tasks, runs, split, kind in ((1, 3, 2, None, "train"), (2, 4, 4, 2, "train"), (3, 3, 4, 1, "eval")):
        final, events = live(seed, tasks, runs, split, kind)
        state: Any = None
        rows = []
        for event in events:
            state = evolve(state, event)
            rows.append({
                "type": type(event).__name__, "schema_version": type(event).schema_version,
                "data": orjson.loads(codec.check(event)[0]),
                "state": [state.state.value, state.completed_task_count, len(state.pending), len(state.flights)],
            })
        cases.append({"events": rows, "result": final.final_result})
    (GOLDEN / f"{name}.json").write_bytes(orjson.dumps(cases, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    record(sys.argv[1])
