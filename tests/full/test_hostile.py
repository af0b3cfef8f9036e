"""Texts of a rollout that are HTML, escapes, markup or a megabyte: harmless in every command and export."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest

from benchmarks.sample_log import make
from benchmarks.sample_run import HOSTILE
from tests.helpers.handmade import cli, write
from tests.helpers.timed_logs import long_batch
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, InvalidEvent
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.safe_text import harmless_json, plain

LONG = "[red]no markup[/red]" + "<script>alert(1)</script>\x1b[31m" * 40_000
COMMANDS: list[list[object]] = [
    ["batches"], ["batches", "--slowest", 3], ["show", 2], ["show", 2, "--all"], ["show", 2, "--task", 1],
    ["show", 2, "--task", 1, "--run", 0], ["show", 2, "--task", 1, "--run", 0, "--all"], ["events"], ["replay", 2],
    ["diff", 2, "--at", 30], ["runners"], ["runners", "runner-0"], ["weights"], ["usage"], ["prompts", "--never"],
    ["watch", "--once"], ["verify"], ["why"], ["status"],
]
LONG_ONES = [
    ["long" if arg == 2 else 0 if arg == 1 else arg for arg in command] for command in COMMANDS if 2 in command
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is hostile, and a batch with texts of a megabyte."""
    path = tmp_path_factory.mktemp("hostile") / "log.sqlite"
    make(str(path), batches=10, tasks=6, seed=1, hostile=True, dead=True)
    write(path, [("batch/long", long_batch(str(path), LONG))])
    return path


def harmless(text: str) -> None:
    """Nothing that a terminal obeys, hides or turns round; only lines."""
    found = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert found == set(), f"{found!r} in {text[:300]!r}"


@pytest.mark.parametrize("command", [*COMMANDS, *LONG_ONES], ids=lambda c: " ".join(map(str, c)))
def test_no_command_lets_a_text_reach_the_terminal(log: Path, command: list[object]) -> None:
    text, data = cli(*command, "--log", log), cli(*command, "--json", "--log", log)
    for done in (text, data):
        assert done.exit_code in (0, 1), done.output[-2000:]
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        harmless(done.stdout)
        harmless(done.stderr)
    if command[0] == "events":
        assert [json.loads(line)["position"] for line in data.stdout.splitlines()]
    else:
        json.loads(data.stdout)
    if "--all" not in command:
        assert max(map(len, text.stdout.splitlines() or [""])) < 4000


def test_texts_are_there_as_text(log: Path) -> None:
    everything = "".join(cli("show", n, "--task", t, "--run", 0, "--all", "--log", log).stdout
                         for n in (1, 2, 3) for t in range(3))
    assert "<script>" in everything or "<img src=x" in everything
    assert "[red]no markup[/red]" in cli("events", "--log", log).stdout


def test_exports_hold_the_texts_unchanged_and_as_data(log: Path, tmp_path: Path) -> None:
    files = {"--experiences": "e.jsonl", "--events": "v.jsonl", "--trace": "t.json"}
    done = cli("export", *(a for k, f in files.items() for a in (k, tmp_path / f)), "--log", log)
    assert done.exit_code == 0, done.output
    harmless(done.stdout)
    for name in files.values():
        harmless((tmp_path / name).read_text())
    rows = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    with open_log(str(log)) as opened:
        store = opened.payloads()
        finalized = [r.event for r in opened.read(types=["BatchFinalized"]) if isinstance(r.event, ev.BatchFinalized)]
        wanted = [(e.prompt_text, e.response_text) for f in finalized for ref in f.experiences
                  for e in read_experiences(store, [ref])]
    assert [(row["prompt"], row["completion"]) for row in rows] == wanted
    assert any("\x1b" in (prompt or "") for prompt, _ in wanted)
    json.loads((tmp_path / "t.json").read_text())
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    cli("export", "--experiences", tmp_path / "e.parquet", "--log", log)
    table = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    assert [(row["prompt"], row["completion"]) for row in table] == wanted


def test_a_megabyte_is_exported_whole(log: Path, tmp_path: Path) -> None:
    assert cli("export", "long", "--as-made", "--experiences", tmp_path / "e.jsonl", "--log", log).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in rows] == [LONG, "short"]


def test_diff_of_two_hostile_runs_is_harmless(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "log.sqlite"
    make(str(other), batches=2, tasks=6, seed=2, hostile=True, payloads=False)
    done = cli("diff", log, other)
    assert done.exit_code == 1, done.output
    harmless(done.stdout)


def test_an_argument_that_is_no_text_ends_in_one_line(log: Path) -> None:
    for command in (["show", "\udcff\x1b[31m"], ["replay", "2", "--at", "\udcff"], ["runners", "\x1b[31m"]):
        done = cli(*command, "--log", log)
        assert done.exit_code == 2
        assert "\x1b" not in done.output
        assert "Traceback" not in done.output


def test_a_lone_surrogate_and_bytes_that_are_no_text_never_get_in() -> None:
    with pytest.raises(DataError):
        Experience(tokens=[1, 2], prompt_length=1, response_text="\ud800")
    from trinity_es.events.codec import check

    with pytest.raises(InvalidEvent):
        check(ev.BatchPaused(reason="\udcff"))


def test_json_says_the_same_when_it_is_made_harmless() -> None:
    nasty = "".join(map(chr, [*range(0x20, 0x100), 0x202E, 0x2066, 0xFEFF, 0x2028])) + "".join(HOSTILE)
    document = json.dumps({"a": nasty}, ensure_ascii=False).encode()
    assert json.loads(harmless_json(document)) == {"a": nasty}
    harmless(harmless_json(document).decode())
    assert harmless_json(b'{"a":"\xff"}').decode()  # not even bytes that are no text


def test_plain_is_one_short_printable_line() -> None:
    for text in [*HOSTILE, LONG, "\ud800\udfff", "".join(map(chr, range(sys.maxunicode + 1)))[:70_000]]:
        line = plain(text, 100)
        assert len(line) <= 100
        assert line.isprintable()
        assert not re.search(r"[\n\r]", plain(text[:1000]))
