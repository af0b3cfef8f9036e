"""trinity_es.tasksets: every row once an epoch, in one order, from any cursor on; bad rows are named."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.values import Task, task_from_dict, task_to_dict
from trinity_es.config import TasksetConfig
from trinity_es.tasksets import Cursor, Taskset, TasksetError


def taskset(path: Path, text: str | bytes, **keys: Any) -> Taskset:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Taskset(TasksetConfig(name="t", path=str(path), **keys))


def rows(n: int) -> str:
    return "".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(n))


def numbers(tasks: list[Task]) -> list[int]:
    return [task.index["index"] for task in tasks]


def drain(tasks: Taskset, cuts: list[int]) -> list[int]:
    """Read to the end in batches of these sizes, then of 3."""
    out: list[int] = []
    cursor = Cursor()
    for n in [*cuts, *[3] * 200]:
        batch, cursor = tasks.read(cursor, n)
        assert len(batch) <= n
        out += numbers(batch)
        if n and not batch:
            return out
    raise AssertionError("no end")


# --- reading --------------------------------------------------------------------------------------------------------
@given(
    n=st.integers(1, 12), epochs=st.integers(1, 4), shuffle=st.booleans(), seed=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 15), max_size=8),
)
def test_every_row_comes_once_an_epoch_however_it_is_cut(
    n: int, epochs: int, shuffle: bool, seed: int, cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tasks = taskset(Path(folder, "a.jsonl"), rows(n), epochs=epochs, shuffle=shuffle, seed=seed)
        read = drain(tasks, cuts)
        for epoch in range(epochs):
            assert sorted(read[epoch * n:(epoch + 1) * n]) == list(range(n))
        assert len(read) == n * epochs
        whole, end = tasks.read(Cursor(), n * epochs)
        assert numbers(whole) == read
        assert end == Cursor(epochs, 0)
        assert tasks.read(end, 5) == ([], end)


@given(at=st.integers(0, 21), n=st.integers(0, 21))
def test_a_new_reader_goes_on_from_a_cursor(at: int, n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = taskset(Path(folder, "a.jsonl"), rows(7), epochs=3, shuffle=True)
        before, cursor = first.read(Cursor(), at)
        again = Taskset(first.config)
        after, _ = again.read(cursor, n)
        assert numbers(before + after) == numbers(first.read(Cursor(), at + n)[0])


def test_the_order_is_the_files_unless_it_is_shuffled_anew_every_epoch(tmp_path: Path) -> None:
    plain = taskset(tmp_path / "a.jsonl", rows(6), epochs=2)
    assert numbers(plain.read(Cursor(), 12)[0]) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    shuffled = Taskset(plain.config.model_copy(update={"shuffle": True, "seed": 3}))
    order = numbers(shuffled.read(Cursor(), 12)[0])
    # Written down: another order after an upgrade would skip and repeat prompts of every run that is resumed.
    assert order == [1, 2, 5, 0, 3, 4, 5, 2, 0, 1, 3, 4]
    other = Taskset(plain.config.model_copy(update={"shuffle": True, "seed": 4}))
    assert numbers(other.read(Cursor(), 12)[0]) != order


def test_a_taskset_without_epochs_never_ends(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", rows(3), epochs=None)
    batch, cursor = tasks.read(Cursor(1000, 2), 8)
    assert Counter(numbers(batch)) == {0: 3, 1: 2, 2: 3}
    assert cursor == Cursor(1003, 1)


def test_the_last_batch_may_be_short(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", rows(5))
    batch, cursor = tasks.read(Cursor(0, 3), 4)
    assert (numbers(batch), cursor) == ([3, 4], Cursor(1, 0))


@pytest.mark.parametrize(("cursor", "n"), [(Cursor(0, 4), 1), (Cursor(-1, 0), 1), (Cursor(0, -1), 1), (Cursor(), -1)])
def test_a_place_that_is_not_in_the_taskset_is_refused(tmp_path: Path, cursor: Cursor, n: int) -> None:
    with pytest.raises(ValueError, match=r"outside of taskset t|n must be 0 or more"):
        taskset(tmp_path / "a.jsonl", rows(3)).read(cursor, n)


def test_a_task_carries_what_the_config_says(tmp_path: Path) -> None:
    tasks = taskset(
        tmp_path / "a.jsonl", '{"q": "1+1", "a": "2", "extra": [1]}', repeat_times=4, workflow="m:W",
        workflow_args={"w": 1}, reward_fn="m:r", reward_fn_args={"x": 2}, rollout_args={"temperature": 0.5},
        format={"prompt_key": "q", "response_key": "a", "system_prompt": "Be brief."},
    )
    [task] = tasks.read(Cursor(), 1)[0]
    assert task == Task(
        workflow="m:W", repeat_times=4, workflow_args={"w": 1}, reward_fn="m:r", reward_fn_args={"x": 2},
        rollout_args={"temperature": 0.5}, raw_task={"q": "1+1", "a": "2", "extra": [1]},
        format_args={"prompt_key": "q", "response_key": "a", "system_prompt": "Be brief."},
        index={"taskset": "t", "index": 0},
    )
    assert (task.task_desc, task.truth) == ("1+1", "2")
    assert task_from_dict(task_to_dict(task)) == task


def test_an_eval_set_is_read_whole(tmp_path: Path) -> None:
    config = taskset(tmp_path / "a.jsonl", rows(3), shuffle=True, epochs=5).config
    tasks = Taskset(config, is_eval=True).all()
    assert numbers(tasks) == [0, 1, 2]
    assert all(task.is_eval for task in tasks)


def test_a_split_chooses_a_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(rows(2))
    assert len(Taskset(TasksetConfig(name="t", path=str(tmp_path), split="test"))) == 2
    with pytest.raises(TasksetError, match=r"choose <split>.jsonl"):
        Taskset(TasksetConfig(name="t", path=str(tmp_path)))


# --- the file -------------------------------------------------------------------------------------------------------
def test_blank_lines_a_byte_order_mark_and_no_last_newline_are_fine(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \t\n{"prompt": "\xc3\xa9"}'
    tasks = taskset(tmp_path / "a.jsonl", text).all()
    assert [task.task_desc for task in tasks] == ["a", "é"]
    assert numbers(tasks) == [0, 1]


@pytest.mark.parametrize(("line", "message"), [
    (b'{"prompt": ', "not JSON (unexpected end of data): fix or remove the line"),
    (b'{"prompt": NaN}', "not JSON ("),
    (b'{"prompt": "\xff"}', "not UTF-8 (byte 12): save the file as UTF-8"),
    (b'["prompt"]', "must be a JSON object, not a list: fix or remove the line"),
    (b'3', "must be a JSON object, not 3: fix or remove the line"),
    (b'{"question": "a", "b": 1}', "no prompt: the key 'prompt' is missing (there are: question, b); name the "),
])
def test_a_bad_row_stops_the_loading_and_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(TasksetError) as e:
        taskset(tmp_path / "a.jsonl", b'{"prompt": "a"}\n' * 15 + b"\n" + line + b'\n{"prompt": "b"}\n')
    assert str(e.value).startswith(f"{tmp_path}/a.jsonl line 17: {message}")
    assert e.value.details == {"file": f"{tmp_path}/a.jsonl", "line": 17}


@pytest.mark.parametrize("text", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(TasksetError, match="is empty"):
        taskset(tmp_path / "a.jsonl", text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=r"taskset t: .*none.jsonl can't be read \(No such file"):
        Taskset(TasksetConfig(name="t", path=str(tmp_path / "none.jsonl")))


def test_a_file_that_changed_in_use_is_refused(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", rows(3))
    with (tmp_path / "a.jsonl").open("a") as f:
        f.write('{"prompt": "new"}\n')
    with pytest.raises(TasksetError, match="was changed while taskset t was in use"):
        tasks.read(Cursor(), 1)


def test_what_lines_say_is_not_kept_in_memory(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", b'{"prompt": "' + b"x" * 200_000 + b'"}\n' + rows(2).encode())
    assert os.path.getsize(tmp_path / "a.jsonl") > 200_000
    held = [getattr(tasks, name) for name in vars(tasks)]
    assert sum(len(bytes(v)) if hasattr(v, "tobytes") else len(repr(v)) for v in held) < 2_000
