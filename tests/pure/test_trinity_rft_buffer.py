"""The experience buffer of Trinity-RFT 0.6.0 as an output: its tables, and the bytes that its trainer reads."""

from __future__ import annotations

import pickle
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from trinity_es.actors.coordinator.delivery.outputs import build_outputs
from trinity_es.events.experience import EID, Experience

NAME = "trinity_es.integrations.trinity_rft:SQLBuffer"


def experience(run: int) -> Experience:
    return Experience(
        eid=EID(batch=3, task=1, run=run, suffix=f"s{run}"), tokens=[1, 2, 3], prompt_length=1, logprobs=[-0.5, -1.0],
        reward=0.25, info={"model_version": 7}, metrics={"right": 1.0}, response_text="b c")


def read(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `Experience.deserialize` of Trinity-RFT reads it."""
    assert data.startswith(b"TRXP")
    version, head, body = struct.unpack("<BQQ", data[4:21])
    assert (version, len(data)) == (1, 21 + head + body)
    told = pickle.loads(data[21 : 21 + head])
    assert (told["version"], told["num_items"]) == (1, 1)
    return told["items"][0], load(data[21 + head :])


def test_a_batch_is_rows_and_bytes_in_its_tables_once_however_often_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "buffer.db"
    config = [{"name": NAME, "args": {"url": f"sqlite:///{file}", "name": "letters"}}]
    for _ in range(2):  # a coordinator, and the next one
        output = build_outputs(config, str(tmp_path))["SQLBuffer"]
        for key, runs in (("step-3-a", (0, 1)), ("step-4-a", (2,))):
            output.write(key, [experience(run) for run in runs])
    with sqlite3.connect(file) as database:
        rows = database.execute(
            "SELECT id, task_id, run_id, msg_id, model_version, reward, consumed, timestamp IS NULL FROM letters")
        assert rows.fetchall() == [(i + 1, "1", i, f"s{i}", 7, 0.25, 0, 0) for i in range(3)]
        blobs = dict(database.execute("SELECT id, experience_bytes FROM letters_blob").fetchall())
    assert sorted(blobs) == [1, 2, 3]
    told, arrays = read(blobs[2])
    assert told["eid"] == {"batch": 3, "task": 1, "run": 1, "step": 0, "suffix": "s1"}
    assert (told["reward"], told["prompt_length"], told["response_text"]) == (0.25, 1, "b c")
    assert arrays["0:tokens"].tolist() == [1, 2, 3]
    assert arrays["0:action_mask"].dtype == np.bool_
    assert arrays["0:logprobs"].tolist() == [-0.5, -1.0]
