"""Pipeline output that writes the experience buffer of Trinity-RFT 0.6.0, for its trainer with `storage_type: sql`.

Each experience is a row of numbers in the table `<name>`, and its bytes in Trinity-RFT's format in `<name>_blob`.
Neither Trinity-RFT nor torch is needed.

    buffer: {pipeline: {outputs: [{name: "trinity_es.integrations.trinity_rft:SQLBuffer", args: {url: ...}}]}}
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import sqlalchemy as sa
from safetensors.numpy import save

from trinity_es.events.experience import Experience

__all__ = ["SQLBuffer", "serialize"]

_MAGIC, _VERSION = b"TRXP", 1
_ARRAYS = (
    "tokens", "logprobs", "token_level_reward", "advantages", "returns", "action_mask", "teacher_logprobs",
    "routed_experts",
)
_PLAIN = (
    "reward", "truncate_status", "info", "metrics", "prompt_length", "response_text", "prompt_text", "messages",
    "tools", "chosen_messages", "rejected_messages",
)


class SQLBuffer:
    """Writer of the buffer. `url`: SQLite or PostgreSQL; `name`: name of `experience_buffer` in Trinity-RFT's config.

    Each batch is written in one transaction, and only once, since `<name>_written` has the keys of written batches.
    """

    def __init__(self, url: str, name: str = "experience_buffer") -> None:
        tables = sa.MetaData()
        self._rows = sa.Table(
            name, tables, sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
            sa.Column("timestamp", sa.DateTime, server_default=sa.func.now()),
            sa.Column("task_id", sa.String(64), index=True), sa.Column("run_id", sa.Integer, index=True),
            sa.Column("msg_id", sa.String(64), index=True), sa.Column("model_version", sa.Integer, index=True),
            sa.Column("reward", sa.Float, index=True), sa.Column("consumed", sa.Integer, default=0, index=True))
        self._blobs = sa.Table(
            f"{name}_blob", tables, sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("experience_bytes", sa.LargeBinary, nullable=False))
        self._written = sa.Table(f"{name}_written", tables, sa.Column("key", sa.String(255), primary_key=True))
        self._tables, self._engine = tables, sa.create_engine(url)
        self._has_tables = False

    def write(self, key: str, experiences: Iterable[Experience]) -> None:
        """Write the batch `key`, unless it is written already."""
        if not self._has_tables:
            self._tables.create_all(self._engine)
            self._has_tables = True
        with self._engine.begin() as connection:
            if connection.execute(sa.select(self._written).where(self._written.c.key == key)).first():
                return
            connection.execute(self._written.insert().values(key=key))
            for experience in experiences:
                eid = experience.eid
                result = connection.execute(self._rows.insert().values(
                    task_id=str(eid.task), run_id=eid.run, msg_id=str(eid.suffix), reward=experience.reward,
                    model_version=(experience.info or {}).get("model_version"), consumed=0))
                [row_id] = result.inserted_primary_key or (None,)
                connection.execute(self._blobs.insert().values(id=row_id, experience_bytes=serialize(experience)))


def serialize(experience: Experience) -> bytes:
    """Return the same bytes as Trinity-RFT's `Experience.serialize`: a pickled header, then the arrays."""
    present_arrays = {name: value for name in _ARRAYS if (value := getattr(experience, name, None)) is not None}
    arrays = {f"0:{name}": np.ascontiguousarray(value) for name, value in present_arrays.items()}
    fields: dict[str, Any] = {name: getattr(experience, name, None) for name in _PLAIN}
    fields |= {"eid": experience.eid.to_dict(), "custom_fields": [], "multi_modal_input_keys": []}
    head = pickle.dumps({"version": _VERSION, "num_items": 1, "items": [fields]}, protocol=pickle.HIGHEST_PROTOCOL)
    body = save(arrays)
    return _MAGIC + struct.pack("<BQQ", _VERSION, len(head), len(body)) + head + body
