"""Compare what two checkouts show of the same logs: every command that reads a log, every page of the dashboard.

    python -m benchmarks.sample_log /tmp/one.sqlite --events 2000 --tasks 8 --runs 4 --keep 1000
    python -m benchmarks.sample_log /tmp/two.sqlite --events 2000 --tasks 8 --runs 4 --keep 1000 --end dead --hostile
    python benchmarks/compare_outputs.py OLD_CHECKOUT NEW_CHECKOUT /tmp/one.sqlite /tmp/two.sqlite

OLD_CHECKOUT is asked once, its answers lie beside each log (LOG.answers) until they are deleted.
Each checkout's commands are run in one process of its own, each with `--json` and with its plain text piped, and so are
the files that `export` writes. The clock stands still, just after the log's last event; how long a command took is
left out. The logs are opened for reading only. Prints the differences; exits 1 where there are some.
"""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOK = re.compile(r"\"seconds\": [\d.e-]+$|in [\d.]+ s \([\d,]+ events/s\)|[\d,]+ a second|, made in [\d.]+ s", re.M)
MOST_LINES = 40
"""Lines of one difference that are printed."""


def collect(url: str, other: str) -> Iterator[tuple[str, str]]:
    """Yield (what was asked, what came) of this process's checkout."""
    from typer.testing import CliRunner

    from trinity_es import open_log
    from trinity_es.cli import app

    with open_log(url) as log:
        rows, head = log.batches(), log.head().position
        last = log.at(head)
        runs = {row.batch_id: [(t, r) for t in (0, 1, row.tasks - 1) for r in (0, 1)] for row in rows}
        runners = sorted({life.runner for life in log.runner_lives()})
        versions = [w.version for w in log.weights()][-2:]
        experience = next((e.eid.uid for e in _experiences(log)), None)
    assert last is not None
    now = last.recorded_at + 100.0
    time.time = lambda: now
    picked = list(dict.fromkeys([*rows[:2], *[r for r in rows if r.batch_type == "eval"][:2], *rows[-3:]]))
    commands = [
        ["batches"], ["batches", "--all"], ["batches", "--slowest", "3"], ["batches", "--sort", "reward", "-d"],
        ["batches", "--type", "eval"], ["batches", "--since", str(head // 2)], ["events", "--last", "100"],
        ["events", "--type", "SystemConfigured"], ["runners"], *(["runners", name] for name in runners), ["weights"],
        ["usage"], ["prompts"], ["prompts", "--never"], ["verify"], ["why"], ["status"], ["watch", "--once"],
        ["what-if"], ["what-if", "--runners", "2"], ["diff", url, other],
        *([["show", experience]] if experience else []),
    ]
    for row in picked:
        batch, middle = str(row.batch_id), (row.first_position + row.last_position) // 2
        commands += [
            ["show", batch], ["show", batch, "--all"], ["replay", batch], ["replay", batch, "--at", str(middle)],
            ["diff", batch, "--at", str(middle)], ["why", batch], ["events", batch],
            *(["show", batch, "--task", str(t)] for t in {t: 0 for t, _ in runs[row.batch_id]}),
            *(["show", batch, "--task", str(t), "--run", str(r)] for t, r in runs[row.batch_id]),
            *(["show", batch, "--task", str(t), "--run", str(r), "--all"] for t, r in runs[row.batch_id][:1]),
        ]
    for command in commands:
        for flags in ([], ["--json"]):
            where = [] if command[0] == "diff" and command[1] == url else ["--log", url]
            done = CliRunner().invoke(app, [*command, *flags, *where])
            yield " ".join([*command, *flags]), f"exit {done.exit_code}\n{done.output}\n{done.exception!r}"
    yield from _exports(url, str(picked[-1].batch_id))
    find_rollout = _found("trinity_es.audit.regenerate:find_rollout", "trinity_es.regenerating:find_rollout")
    for row in picked:
        for task, run in runs[row.batch_id][:2]:
            with open_log(url) as log:
                try:
                    found = repr(find_rollout(log, row.batch_id, task, run))
                except Exception as e:
                    found = repr(e)
            yield f"find_rollout {row.batch_id} {task} {run}", found
    yield from _pages(url, other, [r.batch_id for r in picked], runs, runners, versions)


def _found(*names: str) -> Any:
    """Return what has one of these names ("module:name"), which a checkout of another age calls otherwise."""
    for name in names:
        try:
            return pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            pass
    raise ImportError(f"none of {names} is there")


def _experiences(log):  # type: ignore[no-untyped-def]
    exported = _found("trinity_es.audit.export:Exported", "trinity_es.exporting:Exported")
    experience_rows = _found("trinity_es.audit.export:experience_rows", "trinity_es.exporting:experience_rows")

    class Row:
        def __init__(self, uid: str) -> None:
            self.eid = type("EID", (), {"uid": uid})

    for rows in experience_rows(log, exported()):
        for row in rows:
            yield Row(row["eid"])


def _exports(url: str, batch: str) -> Iterator[tuple[str, str]]:
    from typer.testing import CliRunner

    from trinity_es.cli import app

    with tempfile.TemporaryDirectory() as folder:
        files = {kind: os.path.join(folder, name) for kind, name in (
            ("--experiences", "e.jsonl"), ("--events", "events.jsonl"), ("--trace", "trace.json"))}
        for made in ([], ["--as-made"]):
            for chosen in ([], [batch]):
                asked = ["export", *chosen, *made, "--force", *(x for pair in files.items() for x in pair)]
                done = CliRunner().invoke(app, [*asked, "--log", url])
                yield " ".join(["export", *chosen, *made]), done.output.replace(folder, "FOLDER")
                for kind, file in files.items():
                    yield " ".join(["export", *chosen, *made, kind]), _text(Path(file))
        page = os.path.join(folder, "page.html")
        CliRunner().invoke(app, ["export", batch, "--html", page, "--log", url])
        yield "export --html", _text(Path(page))
        table = os.path.join(folder, "e.parquet")
        done = CliRunner().invoke(app, ["export", "--experiences", table, "--log", url])
        if os.path.exists(table):
            import pyarrow.parquet as pq

            read = pq.read_table(table)
            yield "export parquet", f"{read.schema}\n{json.dumps(read.to_pylist(), indent=1)}"


def _text(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.exists() else "(no file)"


def _pages(url, other, batch_ids, runs, runners, versions) -> Iterator[tuple[str, str]]:  # type: ignore[no-untyped-def]
    from starlette.testclient import TestClient

    from trinity_es.dashboard.app import create_app
    from trinity_es.dashboard.page import batch_ref, link

    pages = ["/", "/batches", "/batches?type=eval", "/batches?sort=reward", "/rollouts", "/rollouts?sort=task",
             "/rollouts?type=eval", "/runners", "/runners?sort=deaths", "/weights", "/events", "/events?kind=rare",
             "/metrics", "/nowhere", "/batch?id=nowhere"]
    pages += [link("/runner", name=name) for name in runners] + [link("/weights", version=v) for v in versions]
    for batch_id in batch_ids:
        ref = batch_ref(batch_id)
        pages += [link("/batch", id=ref), link("/batch", id=ref, sort="reward", order="down"),
                  link("/batch/steps", id=ref), link("/batch/asof", id=ref, n=9), link("/batch/asof", id=ref, n=40),
                  link("/rollouts", id=ref), link("/rollouts", id=ref, sort="tokens", page=2),
                  link("/compare", id=ref, id2=batch_ref(batch_ids[0])), link("/compare", id=ref, at=200, id2=ref),
                  link("/compare", id=ref, id2=ref, **{"in": "this"}, at=300, at2=900),
                  link("/compare", id=ref, id2=batch_ref(batch_ids[-1]), **{"in": "this"}, show="all")]
        for task, run in runs[batch_id]:
            pages += [link("/rollout", id=ref, task=task, run=run), link("/rollout.txt", id=ref, task=task, run=run)]
    with TestClient(create_app(url, other=other), base_url="http://localhost") as client:
        for page in pages:
            for time_of in ("", " again"):  # the second is from what was kept
                answer = client.get(page)
                yield f"page {page}{time_of}", f"{answer.status_code}\n{answer.text}"


def _of(checkout: str, url: str, other: str) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(Path(checkout).resolve()), "COLUMNS": "150", "TZ": "UTC"}
    command = [sys.executable, str(Path(__file__).resolve()), "--collect", url, other]
    done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return {what: TOOK.sub("TOOK", came) for what, came in found.items()}


def main(old: str, new: str, urls: list[str]) -> int:
    """Print what differs. Return the exit code."""
    different = asked = 0
    for number, url in enumerate(map(os.path.abspath, urls)):
        other = os.path.abspath(urls[(number + 1) % len(urls)])
        kept = Path(f"{url}.answers")
        if not kept.exists():
            kept.write_text(json.dumps(_of(old, url, other)))
        before, after = json.loads(kept.read_text()), _of(new, url, other)
        asked += len(before)
        for what in [*before, *(w for w in after if w not in before)]:
            was, now = before.get(what, "(not there)"), after.get(what, "(not there)")
            if was != now:
                different += 1
                lines = list(difflib.unified_diff(was.splitlines(), now.splitlines(), lineterm="", n=1))
                print(f"=== {url}: {what}", *(line[:400] for line in lines[:MOST_LINES]), sep="\n")
    print(f"{different} of {asked} answers differ")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        sys.path[0] = os.getcwd()
        out, sys.stdout = sys.stdout, sys.stderr
        answers = {what: came.encode("utf-8", "backslashreplace").decode() for what, came in collect(*sys.argv[2:])}
        json.dump(answers, out)
    else:
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
