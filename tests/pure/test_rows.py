"""What is in a file arrives as what was meant, whatever the file is; what can't is refused before anything runs."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.helpers.tables import write_dataset, write_parquet
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.errors import TasksetError
from trinity_es.tasksets.taskset import Taskset

CALL = {"name": "add", "arguments": {"a": 1}}
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3?", "answer": "5", "tools": [
        {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int", "minimum": 0}}}},
        {"type": "function", "function": {"name": "now"}}]},
    {"prompt": "6*7?", "level": 3, "meta": {"from": "gsm8k", "tags": []}, "scores": [0.5, None]},
    {"prompt": "ä€😀", "answer": "", "meta": {"tags": ["x", ""]}, "hard": False},
    {"prompt": "nothing", "meta": {}, "scores": []},
]


def opened(path: Path, **config: Any) -> Taskset:
    return Taskset(TasksetConfig(name="t", path=str(path), **config))


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return folder / name


def table(folder: Path, **columns: pa.Array) -> Path:
    parquet.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_the_same_rows_are_the_same_tasks_as_lines_as_parquet_and_as_a_dataset(tmp_path: Path) -> None:
    keys = dict.fromkeys(key for row in ROWS for key in row)
    filled = [{key: row.get(key) for key in keys} for row in ROWS]  # as a table has them
    table, dataset = write_parquet(tmp_path / "a.parquet", filled), write_dataset(tmp_path / "d", filled)
    files = [lines(tmp_path, ROWS), lines(tmp_path, filled, "filled.jsonl"), table, dataset]
    for file in files:
        assert [task.raw_task for task in opened(file).all()] == ROWS, file


def test_a_key_whose_value_is_null_is_no_key(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": None, "meta": {"x": None, "y": [None, {"z": None}]}}
    [task] = opened(lines(tmp_path, [row])).all()
    assert task.raw_task == {"prompt": "a", "meta": {"y": [None, {}]}}


@pytest.mark.parametrize(("column", "found"), [
    (pa.array([b"Wie gro\xc3\x9f?"]), "Wie groß?"),
    (pa.array([b"ab"], pa.binary(2)), "ab"),
    (pa.array([[{"role": "user", "content": b"2+3?"}]]), [{"role": "user", "content": "2+3?"}]),
    (pa.array(["5"]).dictionary_encode(), "5"),
    (pa.array([0.1], pa.float32()), 0.1),
    (pa.array([np.float16(0.1)], pa.float16()), 0.1),
    (pa.array([16777217.0]), 16777217.0),
    (pa.array([2**63], pa.uint64()), 2**63),
    (pa.array([decimal.Decimal("12345678901")]), 12345678901),
    (pa.array([decimal.Decimal("1.50")]), "1.50"),
    (pa.array([dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)]), "2026-03-01T12:00:00+00:00"),
    (pa.array([dt.date(2026, 3, 1)]), "2026-03-01"),
    (pa.array([float("nan")]), None),
    (pa.array([["x", None]]), ["x", None]),
    (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())), {"a": 1}),
    (pa.array([[(b"a", 1)]], pa.map_(pa.binary(), pa.int64())), {"a": 1}),
    (pa.array(["5"], pa.string_view()), "5"),
])
def test_a_value_of_a_table_is_what_its_writer_meant(tmp_path: Path, column: pa.Array, found: Any) -> None:
    [task] = opened(table(tmp_path, prompt=pa.array(["a"]), answer=column)).all()
    assert task.truth == found
    assert type(task.truth) is type(found)


@pytest.mark.parametrize(("column", "said"), [
    (pa.array([b"ok", b"\x00\xff"]), r"row 1: column 'x': the bytes are not UTF-8 \(byte 1\)"),
    (pa.array([1.0, float("inf")]), "row 1: column 'x': JSON can't hold inf"),
    (pa.array([[1.0], [float("-inf")]]), "row 1: column 'x': JSON can't hold -inf"),
    (pa.array([dt.timedelta(1)] * 2), "column 'x' has the type duration"),
    (pa.array([{"d": dt.timedelta(1)}] * 2), "column 'x' has the type duration"),
    (pa.array([[], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
     "row 1: column 'x': the key 'k' appears twice: fix the value, or remove the row"),
])
def test_what_has_no_form_in_json_is_refused_by_its_column(tmp_path: Path, column: pa.Array, said: str) -> None:
    with pytest.raises(TasksetError, match=said):
        opened(table(tmp_path, prompt=pa.array(["a", "b"]), x=column))


@pytest.mark.parametrize(("prompt", "said"), [
    (None, "the prompt is null: give one, or remove the row"),
    (5, "the prompt is 5: a text or a list of chat messages"),
    ({"text": "a"}, "the prompt is {'text': 'a'}: a text or"),
    ([], "the prompt is an empty list"),
    (["a"], "message 0 of the prompt is 'a': an object with"),
    ([{"role": "user", "content": 5}], "the content of message 0 of the prompt is 5"),
    ([{"role": "user"}], "the content of message 0 of the prompt is null"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 of the prompt has the part {'type': 'image_u"),
])
def test_what_is_no_prompt_is_refused_with_its_line(tmp_path: Path, prompt: Any, said: str) -> None:
    with pytest.raises(TasksetError, match=rf"rows.jsonl line 2: {said}"):
        opened(lines(tmp_path, [{"prompt": "a"}, {"prompt": prompt}]))
    if prompt is not None:  # a workflow of the user's own may know what to do with it
        own = opened(lines(tmp_path, [{"prompt": prompt}]), workflow="my:Workflow")
        assert own.task(0).task_desc == prompt


def test_a_row_that_begins_its_answer_and_a_reply_prefix_are_refused_together(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]}
    opened(lines(tmp_path, [row]))
    with pytest.raises(TasksetError, match=r"line 1: .*format\.reply_prefix begins the assistant's answer, too"):
        opened(lines(tmp_path, [row]), format={"reply_prefix": "Sure:"})


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["5"]), pa.array(["6"])]
    parquet.write_table(pa.Table.from_arrays(columns, ["prompt", "answer", "answer"]), tmp_path / "rows.parquet")
    with pytest.raises(TasksetError, match="column 'answer' appears twice"):
        opened(tmp_path / "rows.parquet")


def test_a_row_of_many_keys_is_read_in_the_time_of_its_length(tmp_path: Path) -> None:
    keys = [f'"k{i}": {i}' for i in range(100_000)]
    (tmp_path / "t.jsonl").write_text('{"prompt": "p", ' + ", ".join(keys) + "}\n")
    began = time.process_time()
    opened(tmp_path / "t.jsonl")
    assert time.process_time() - began < 10
    (tmp_path / "t.jsonl").write_text('{"prompt": "p", ' + ", ".join([*keys, keys[7]]) + "}\n")
    with pytest.raises(TasksetError, match="line 1: the key 'k7' appears twice"):
        opened(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["response_key", "workflow_key", "reward_fn_key"])
def test_a_key_of_the_format_that_no_row_has_is_refused(tmp_path: Path, name: str) -> None:
    rows = lines(tmp_path, [{"prompt": "a"}, {"prompt": "b", "level": 3}])
    for file, keys in ((rows, "prompt, level"), (table(tmp_path, prompt=pa.array(["a"])), "prompt")):
        with pytest.raises(TasksetError, match=rf"no row has the key 'mine' of format\.{name} \(there are: {keys}\)"):
            opened(file, format={name: "mine"})
    with rows.open("a") as more:
        more.write('\n{"prompt": "c", "mine": "math_reward"}')
    if name != "workflow_key":
        opened(rows, format={name: "mine"})


def test_a_split_that_chooses_nothing_or_two_files_is_refused(tmp_path: Path) -> None:
    rows = lines(tmp_path, [{"prompt": "a"}])
    with pytest.raises(TasksetError, match=r"rows.jsonl is one file, which has no split 'test': leave out split"):
        opened(rows, split="test")
    table(tmp_path, prompt=pa.array(["b"]))
    with pytest.raises(TasksetError, match=r"has rows.jsonl and rows.parquet, and split 'rows' may be either"):
        opened(tmp_path, split="rows")


ARRAY = r"line 1: .*an object a line; one array becomes that with `jq -c"
LONG = "10000.*0 is a whole number of more than 64 bits"


@pytest.mark.parametrize(("name", "content", "said"), [
    ("t.jsonl.gz", b"\x1f\x8b\x08", "t.jsonl.gz is compressed, or a table in text form"),
    ("t.csv", b"prompt,answer\na,5", "t.csv is compressed, or a table in text form"),
    *(("t.jsonl", text, "is empty") for text in (b"", b"\n \n", b"\xef\xbb\xbf")),
    *(("t.jsonl", text, ARRAY) for text in (b'[\n  {"prompt": "a"}\n]\n', b'[{"prompt": "a"}]')),
    *(("t.jsonl", b'{"prompt": "a", "meta": {"prompt": 1}}\n{"prompt": "b", %s}' % rest, "line 2: the key .* twice")
      for rest in (b'"answer": "5", "answer": "6"', b'"meta": {"prompt": 1, "prompt": 2}')),
    *(("t.jsonl", b'{"prompt": "a", "answer": 1%s}' % (b"0" * n), rf"line 1: not JSON \({LONG}") for n in (20, 5000)),
    ("t.jsonl", b'{"prompt": "a", "answer": %s%s}' % (b"[" * 900, b"]" * 900),
     r"line 1: not JSON \(its lists or objects are nested hundreds"),
], ids=lambda value: ascii(value)[:40])
def test_a_file_that_is_no_rows_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TasksetError, match=said):
        opened(tmp_path / name)


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "-9223372036854775809", "18446744073709551616"])
def test_a_number_that_would_be_rounded_is_refused(tmp_path: Path, number: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 18446744073709551615}\n'
                                         f'{{"prompt": "b", "answer": {number}}}')
    with pytest.raises(TasksetError, match=f"line 2: not JSON .*{number[:20]}.*write it as a text"):
        opened(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "answer": "{number}"}}')
    assert opened(tmp_path / "rows.jsonl").task(0).truth == number
