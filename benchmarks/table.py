"""Table of all benchmark results: each aim, whether it is reached, and the other load during the measurement.

Reads the results of `make bench` (`benchmarks/results/*.json`), prints a Markdown table, and writes JSON. An aim
without a measurement has a row, too.

`python -m benchmarks.table [--folder benchmarks/results] [--json FILE]`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compared import Row, Spread, load_text, number_format, options_of

AIMS = {
    "E1": "submit -> finalize of no-op tasks", "E2": "tasks and runs a second", "E3": "share of the ideal",
    "E4": "over the bare engine", "E5": "append", "E6": "replay, rebuild", "E7": "delivery, and bytes stored",
    "E8": "a batch of 100,000 tasks; an idle system", "E9": "the same on a long log, with many batches, "
    "engines, hosts", "E10": "the eventsourcing library", "E11": "weight sync under load",
    "E12": "places that follow the load", "S3": "payloads in S3 against files",
}
SOURCES = {
    "dispatch": "E1", "overhead": "E4", "log_append": "E5", "replay": "E6", "payloads": "E7", "large_batch": "E8",
    "growth": "E9", "eventsourcing_library": "E10", "weight_sync": "E11", "adaptive": "E12",
}
"""{benchmark: id of the aim of its rows, unless a row names its own}."""


class Line(NamedTuple):
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
        return cls(id, row.what.strip(), f"{spread_text(row.ours)} {row.unit}", row.other, spread_text(row.theirs),
                   spread_text(row.ratio), row.aim_text(), verdict(row))


def spread_text(spread: Spread | None) -> str:
    """Return a figure as text, with minimum and maximum if it was measured more than once."""
    if spread is None:
        return ""
    form = number_format(spread.median)
    return spread.as_text(form) if spread.times > 1 else f"{spread.median:{form}}"


def verdict(row: Row) -> str:
    """Return as text whether a row's aim is reached, or by how much it is missed."""
    if row.aim is None:
        return ""
    judged = row.ratio if row.other else row.ours
    if row.met is None or judged is None:
        return f"not measured: without {row.other}"
    if row.met:
        return "reached"
    factor = judged.median / row.aim if row.most else row.aim / judged.median
    return f"missed: {factor:.2f} times" if factor >= 1.1 else f"missed by {factor - 1:.1%}"


def row_of(fields: Mapping[str, Any]) -> Row:
    spreads = {key: None if fields.get(key) is None else Spread(**fields[key]) for key in ("ours", "theirs", "ratio")}
    return Row(**{k: v for k, v in fields.items() if k != "met"} | spreads)


def lines(results: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return the table's lines for all results, {benchmark: result}, in the order of the aims."""
    by_aim: dict[str, list[Line]] = {id: [] for id in AIMS}
    for name, source in SOURCES.items():
        for row in map(row_of, results.get(name, {}).get("rows", ())):
            by_aim[row.id or source].append(Line.of(row.id or source, row))
    return [line for id, aim_lines in by_aim.items() for line in aim_lines or [Line(id, AIMS[id])]]


def markdown(table: list[Line]) -> Iterator[str]:
    yield "| | what | here | against | | here / that | aim | |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in table:
        yield f"| {' | '.join(line)} |"


def context_lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines that say when and where each benchmark ran, the other load, and the parts that it left out."""
    for name, result in results.items():
        if "beside" not in result:
            continue
        host = result["machine"]
        yield (f"- {name}: {result['date']}, commit {result['commit'] or 'unknown'}, {host['cores']} cores, "
               f"{host['memory_gb']} GB, Python {host['python']}, {host['system']}; "
               f"{result['beside']['seconds']:,.0f} s. {load_text(result['beside'])}")
        for reason in result["left_out"]:
            yield f"  - left out: {reason}"


def main() -> int:
    options = options_of(__doc__, [
        ("--folder", {"default": "benchmarks/results", "help": "where the benchmarks' JSON is"})], quick=False)
    files = [Path(options.folder) / f"{name}.json" for name in SOURCES]
    results = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    table = lines(results)
    print("Median (least - greatest) of turns that alternate.\n")
    for text in [*markdown(table), "", *context_lines(results)]:
        print(text)
    if options.json:
        rows = [{**row, "id": row.get("id") or SOURCES[name], "benchmark": name}
                for name, result in results.items() for row in result.get("rows", ())]
        lacking = [one.id for one in table if not one.ours]
        measured_by = {name: {k: v for k, v in result.items() if k != "rows"} for name, result in results.items()}
        figures = {"rows": rows, "not_measured": lacking, "measured": measured_by}
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
