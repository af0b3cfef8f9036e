"""Read model of the open leases, folded from stream `leases`.

The table has a row for each open lease, so its size does not grow with old leases.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

import orjson
from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, Text, delete, insert, inspect, select

from trinity_es.events.store.log import Recorded
from trinity_es.projections.leases import OpenLease, OpenLeases, evolve_leases

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["NAME", "apply", "metadata", "read_open"]

NAME = "rm_lease"

metadata = MetaData()

_table = Table(
    NAME, metadata,
    Column("lease", String(255), primary_key=True),
    Column("position", BigInteger, nullable=False),  # position of its LeaseTaken
    Column("data", Text, nullable=False),  # the `OpenLease` as JSON
)
_C = _table.c


def apply(connection: Connection, item: Recorded) -> None:
    """Apply one event of stream `leases`: add, change or delete the row of its lease."""
    key = item.event.lease  # type: ignore[attr-defined]  # every event of this stream has it
    row = connection.execute(select(_table).where(_C.lease == key)).one_or_none()
    leases = {} if row is None else {key: _decode(row.data)}
    evolve_leases(leases, item.event)
    connection.execute(delete(_table).where(_C.lease == key))
    if key in leases:
        data = orjson.dumps(asdict(leases[key]), option=orjson.OPT_SORT_KEYS).decode()
        position = item.position if row is None else row.position
        connection.execute(insert(_table), [{"lease": key, "position": position, "data": data}])


@cache
def _adapter() -> TypeAdapter[OpenLease]:
    from pydantic import TypeAdapter  # imported here, because only readers of leases need it

    return TypeAdapter(OpenLease)


def _decode(data: str) -> OpenLease:
    return _adapter().validate_json(data)


def read_open(connection: Connection) -> OpenLeases:
    """Return the open leases in the order in which they were taken; {} if the log is older than this table."""
    if not inspect(connection).has_table(_table.name):
        return {}
    rows = connection.execute(select(_C.lease, _C.data).order_by(_C.position))
    return {row.lease: _decode(row.data) for row in rows}
