"""One table of what the benchmarks found: each aim, how far it is reached, and what else ran while it was measured.

Reads what `make bench` wrote (`benchmarks/results/*.json`), prints it as a Markdown table, and writes it as JSON. An
aim of which nothing was measured is a row too. A row without an aim is told beside one that has one.

`python -m benchmarks.table [--folder benchmarks/results] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compared import Row, Spread, beside_told, form_of

AIMS = {
    "E1": "submit -> finalize of no-op tasks", "E2": "tasks and runs a second", "E3": "share of the ideal",
    "E4": "over the bare engine", "E5": "append", "E6": "replay, rebuild", "E7": "delivery, and bytes stored",
    "E8": "a batch of 100,000 tasks; an idle system", "E9": "the same on a long log, with many batches, "
    "engines, hosts", "E10": "the eventsourcing library", "E11": "weight sync under load",
    "E12": "places that follow the load",
}
SOURCES = {
    "dispatch": "E1", "overhead": "E4", "log_append": "E5", "replay": "E6", "payloads": "E7", "large_batch": "E8",
    "growth": "E9", "eventsourcing_library": "E10", "weight_sync": "E11", "adaptive": "E12",
}
"""Default aim of each benchmark's rows."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    id: str
    what: str
    ours: str = ""
    other: str = ""
    theirs: str = ""
    ratio: str = ""
    aim: str = ""
    verdict: str = "not measured"

    @classmethod
    def of(cls, id: str, row: Row) -> Line:
        return cls(id, row.what.strip(), f"{spread_told(row.ours)} {row.unit}", row.other, spread_told(row.theirs),
                   spread_told(row.ratio), row.aim_told(), verdict(row))


def spread_told(found: Spread | None) -> str:
    """Return a figure as text, with its spread if it was measured more than once."""
    if found is None:
        return ""
    form = form_of(found.median)
    return found.told(form) if found.times > 1 else f"{found.median:{form}}"


def verdict(row: Row) -> str:
    """Return whether the aim is reached, or by how much it is missed."""
    if row.aim is None:
        return ""
    judged = row.ratio if row.other else row.ours
    if row.met is None or judged is None:
        return f"not measured: without {row.other}"
    if row.met:
        return "reached"
    far = judged.median / row.aim if row.most else row.aim / judged.median
    return f"missed: {far:.2f} times" if far >= 1.1 else f"missed by {far - 1:.1%}"


def row_of(found: Mapping[str, Any]) -> Row:
    """Return a row as it was written."""
    spreads = {key: None if found.get(key) is None else Spread(**found[key]) for key in ("ours", "theirs", "ratio")}
    return Row(**{k: v for k, v in found.items() if k != "met"} | spreads)


def lines(results: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return the lines of all results (by benchmark), in the order of the aims."""
    found: dict[str, list[Line]] = {id: [] for id in AIMS}
    for name, source in SOURCES.items():
        for row in map(row_of, results.get(name, {}).get("rows", ())):
            found[row.id or source].append(Line.of(row.id or source, row))
    return [line for id, some in found.items() for line in some or [Line(id, AIMS[id])]]


def markdown(found: list[Line]) -> Iterator[str]:
    """Yield the table, line by line."""
    yield "| | what | here | against | | here / that | aim | |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in found:
        yield (f"| {one.id} | {one.what} | {one.ours} | {one.other} | {one.theirs} | {one.ratio} | {one.aim} "
               f"| {one.verdict} |")


def measured(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield when and where each benchmark ran, what else ran meanwhile, and what it left out."""
    for name, found in results.items():
        if "beside" not in found:
            continue
        on = found["machine"]
        yield (f"- {name}: {found['date']}, commit {found['commit'] or 'unknown'}, {on['cores']} cores, "
               f"{on['memory_gb']} GB, Python {on['python']}, {on['system']}; {found['beside']['seconds']:,.0f} s. "
               f"{beside_told(found['beside'])}")
        for reason in found["left_out"]:
            yield f"  - left out: {reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="benchmarks/results", help="where the benchmarks' JSON is")
    parser.add_argument("--json", help="also write the table to this file")
    options = parser.parse_args()
    files = [Path(options.folder) / f"{name}.json" for name in SOURCES]
    results = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    found = lines(results)
    print("Median (least - greatest) of turns that alternate.\n")
    for text in [*markdown(found), "", *measured(results)]:
        print(text)
    if options.json:
        rows = [{**row, "id": row.get("id") or SOURCES[name], "benchmark": name}
                for name, result in results.items() for row in result.get("rows", ())]
        lacking = [one.id for one in found if not one.ours]
        how = {name: {k: v for k, v in result.items() if k != "rows"} for name, result in results.items()}
        Path(options.json).write_text(json.dumps({"rows": rows, "not_measured": lacking, "measured": how}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
