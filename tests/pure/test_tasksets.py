"""trinity_es.tasksets.taskset: every row once an epoch, in one order, from any cursor on; bad rows are named."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.paths import ROOT
from tests.helpers.tables import write_dataset, write_parquet
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.config.config import load_config
from trinity_es.events.errors import TasksetError
from trinity_es.events.values import Task, task_from_dict, task_to_dict
from trinity_es.tasksets import files
from trinity_es.tasksets.mix import Mix
from trinity_es.tasksets.taskset import Cursor, Taskset


def taskset(path: Path, text: str | bytes, **keys: Any) -> Taskset:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Taskset(TasksetConfig(name="t", path=str(path), **keys))


def refused(path: Path, said: str, **keys: Any) -> None:
    with pytest.raises(TasksetError, match=said):
        Taskset(TasksetConfig(name="t", path=str(path), **keys))


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


def test_the_tasksets_of_the_examples_can_be_read() -> None:
    for file in ROOT.glob("examples/*/*.yaml"):
        config = load_config(file).buffer.explorer_input
        for found in [*config.tasksets, *config.eval_tasksets]:
            if found.kind == "file" and Path(found.path).exists():
                assert Taskset(found).read(Cursor(), 1)[0], file


# --- reading --------------------------------------------------------------------------------------------------------
@given(
    n=st.integers(1, 12), epochs=st.integers(1, 4), shuffle=st.booleans(), seed=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 15), max_size=8),
)
def test_every_row_comes_once_an_epoch(n: int, epochs: int, shuffle: bool, seed: int, cuts: list[int]) -> None:
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


def test_a_taskset_without_epochs_never_ends_and_the_last_batch_of_another_may_be_short(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", rows(3), epochs=None)
    batch, cursor = tasks.read(Cursor(1000, 2), 8)
    assert Counter(numbers(batch)) == {0: 3, 1: 2, 2: 3}
    assert cursor == Cursor(1003, 1)
    batch, cursor = taskset(tmp_path / "b.jsonl", rows(5)).read(Cursor(0, 3), 4)
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
        index={"taskset": "t", "index": 0, "taskset_id": 0},
    )
    assert (task.task_desc, task.truth) == ("1+1", "2")
    assert task_from_dict(task_to_dict(task)) == task


def test_an_eval_set_is_read_whole(tmp_path: Path) -> None:
    config = taskset(tmp_path / "a.jsonl", rows(3), shuffle=True, epochs=5).config
    tasks = Taskset(config, is_eval=True).all()
    assert numbers(tasks) == [0, 1, 2]
    assert all(task.is_eval for task in tasks)


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
    (b'{"question": "a", "b": 1}', "no prompt: the key 'prompt' is missing (there are: question, b); set the "),
])
def test_a_bad_row_stops_the_loading_and_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(TasksetError) as e:
        taskset(tmp_path / "a.jsonl", b'{"prompt": "a"}\n' * 15 + b"\n" + line + b'\n{"prompt": "b"}\n')
    assert str(e.value).startswith(f"{tmp_path}/a.jsonl line 17: {message}")
    assert e.value.details == {"file": f"{tmp_path}/a.jsonl", "line": 17}


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.jsonl", r"taskset t: .*none.jsonl can't be read \(No such file")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"t.{suffix}")
    refused(tmp_path / f"t.{suffix}", rf"t\.{suffix} can't be read \(it is no regular file\)")
    (tmp_path / f"d.{suffix}").symlink_to("/dev/zero")
    refused(tmp_path / f"d.{suffix}", rf"d\.{suffix} can't be read \(it is no regular file\)")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_BYTES", 1000)
    with (tmp_path / "t.jsonl").open("wb") as f:
        f.write(rows(1).encode())
        f.truncate(10_000)
    refused(tmp_path / "t.jsonl", "line 2 has more than 1,000 bytes")


def test_what_lines_say_is_not_kept_in_memory(tmp_path: Path) -> None:
    tasks = taskset(tmp_path / "a.jsonl", b'{"prompt": "' + b"x" * 200_000 + b'"}\n' + rows(2).encode())
    assert os.path.getsize(tmp_path / "a.jsonl") > 200_000
    held = [v for of in (tasks, tasks._file) for v in vars(of).values() if v is not tasks._file]
    assert sum(len(bytes(v)) if hasattr(v, "tobytes") else len(repr(v)) for v in held) < 2_000


def test_a_row_may_name_its_own_workflow_and_reward_function(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"prompt": "a", "play": f"{__name__}:Taskset", "judge": "math_reward"}, {"prompt": "b", "play": None},
    ]
    keys = {"workflow_key": "play", "reward_fn_key": "judge"}
    file = tmp_path / "a.jsonl"
    tasks = taskset(file, "\n".join(map(json.dumps, samples)), workflow="m:W", format=keys)
    first, second = tasks.read(Cursor(), 2)[0]
    assert [(t.workflow, t.reward_fn) for t in (first, second)] == [
        (f"{__name__}:Taskset", "math_reward"), ("m:W", None)]
    assert "workflow_key" not in first.format_args
    for wrong, said in (({"play": 3}, "play is 3: a name"), ({"judge": "math_rewart"}, "judge: .*did you mean"),
                        ({"play": "nowhere:W"}, "play: .*nowhere")):
        lines = [*samples, {"prompt": "c", **wrong}]
        with pytest.raises(TasksetError, match=rf"a.jsonl line 3: {said}"):
            taskset(file, "\n".join(map(json.dumps, lines)), workflow="m:W", format=keys)


# --- parquet and dataset directories --------------------------------------------------------------------------------
SAMPLES = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


def write(folder: Path, kind: str, samples: list[dict[str, Any]]) -> Path:
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, samples)))
        return folder / "rows.jsonl"
    if kind == "dataset":
        return write_dataset(folder / "rows.dataset", samples)
    return write_parquet(folder / "rows.parquet", samples)


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_p33_a_parquet_file_and_a_dataset_directory_are_read_as_jsonl_is(tmp_path: Path, kind: str) -> None:
    """What their values become: test_rows.py."""
    lines, columns = (
        Taskset(TasksetConfig(name="t", path=str(write(tmp_path, of, SAMPLES)), shuffle=True, seed=3, epochs=2))
        for of in ("jsonl", kind))
    cursor = Cursor()
    for n in (4, 3, 9, 4):
        read = columns.read(cursor, n)
        assert read == lines.read(cursor, n)
        cursor = read[1]
    assert cursor == Cursor(2, 0)


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
@pytest.mark.parametrize(("samples", "said"), [
    ([{"question": "a"}, {"question": "b"}], r"no prompt: the key 'prompt' is missing \(there are: question\)"),
    ([{"prompt": "a"}] * 3 + [{"prompt": None}, {"prompt": "b"}], "row 3: the prompt is null"),
])
def test_p33_bad_columns_are_named_at_once(tmp_path: Path, kind: str, samples: list[dict[str, Any]], said: str) -> None:
    refused(write(tmp_path, kind, samples), said)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_a_file_that_changed_in_use_is_refused(tmp_path: Path, kind: str) -> None:
    tasks = Taskset(TasksetConfig(name="t", path=str(write(tmp_path, kind, SAMPLES))))
    os.utime(next(tmp_path.glob("rows.dataset/*.arrow" if kind == "dataset" else "rows.*")), ns=(1, 1))
    with pytest.raises(TasksetError, match="was changed while taskset t was in use"):
        tasks.read(Cursor(), 1)


def test_p33_a_dataset_of_splits_needs_one_chosen(tmp_path: Path) -> None:
    write_dataset(tmp_path / "all/train", SAMPLES)
    write_dataset(tmp_path / "all/test", SAMPLES[:4])
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refused(tmp_path / "all", "holds the splits train, test: set split to one of them")
    assert len(Taskset(TasksetConfig(name="t", path=str(tmp_path / "all"), split="test"))) == 4
    write_parquet(tmp_path / "validation.parquet", SAMPLES[:3])
    assert len(Taskset(TasksetConfig(name="t", path=str(tmp_path), split="validation"))) == 3
    refused(tmp_path, r"To take <split>.jsonl or")


def test_p33_what_is_no_such_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    refused(tmp_path / "a.parquet", r"a\.parquet is not a parquet file")
    old = write_dataset(tmp_path / "old", SAMPLES, _indices_data_files=[{"filename": "indices.arrow"}])
    refused(old, "flatten_indices")
    (old / "state.json").write_text('{"_data_files": [{"filename": "state.json"}]}')
    refused(old, "is not an Arrow stream")
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    refused(tmp_path / "none.parquet", "is empty")


def test_p33_without_pyarrow_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", SAMPLES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(tmp_path / "a.parquet", r"pip install 'trinity-es\[parquet\]'")
    assert len(taskset(tmp_path / "a.jsonl", rows(2))) == 2


# --- several tasksets -----------------------------------------------------------------------------------------------
def mixed(folder: Path, *sets: tuple[int, float, int | None], shuffle: bool = False) -> Mix:
    """Tasksets t0, t1, ... of (rows, ratio, epochs)."""
    made = []
    for i, (n, ratio, epochs) in enumerate(sets):
        (folder / f"{i}.jsonl").write_text(rows(n))
        made.append(Taskset(TasksetConfig(
            name=f"t{i}", path=str(folder / f"{i}.jsonl"), ratio=ratio, epochs=epochs, shuffle=shuffle,
        )))
    return Mix(made)


def places(tasks: list[Task]) -> list[tuple[str, int]]:
    return [(t.index["taskset"], t.index["index"]) for t in tasks]


_CUTS = st.lists(st.integers(0, 9), max_size=10)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.integers(1, 3)),
                   min_size=1, max_size=4),
    cuts=_CUTS, other=_CUTS, shuffle=st.booleans(),
)
def test_p33_a_mix_uses_every_row_as_often_as_its_taskset_says_however_it_is_cut(
    sizes: list[tuple[int, float, int | None]], cuts: list[int], other: list[int], shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        courses = []
        for cut in (cuts, other):
            cursors: dict[str, Cursor] = {}
            read: list[tuple[str, int]] = []
            mix = mixed(Path(folder), *sizes, shuffle=shuffle)
            for n in [*cut, *[4] * 100]:
                mix = Mix([Taskset(t.config) for t in mix.tasksets]) if n == 3 else mix  # as after a restart
                tasks, cursors = mix.read(cursors, n)
                assert len(tasks) <= n
                read += places(tasks)
                if n and not tasks:
                    break
            courses.append(read)
        assert courses[0] == courses[1]
        wanted = {(f"t{i}", row): epochs for i, (n, _, epochs) in enumerate(sizes) for row in range(n)}
        assert Counter(courses[0]) == wanted


def test_p33_every_step_is_shared_out_by_ratio(tmp_path: Path) -> None:
    mix = mixed(tmp_path, (50, 3.0, None), (50, 1.0, None), (7, 0.5, None))
    cursors: dict[str, Cursor] = {}
    given: Counter[str] = Counter()
    for step in range(1, 40):
        tasks, cursors = mix.read(cursors, 9)
        given.update(name for name, _ in places(tasks))
        for name, share in {"t0": 6.0, "t1": 2.0, "t2": 1.0}.items():
            assert abs(given[name] - step * share) <= 1
    # Written down: another order after an upgrade would skip and repeat prompts of every run that is resumed.
    assert [name for name, _ in places(mix.read({}, 9)[0])] == ["t0", "t1", "t0", "t0", "t2", "t0", "t0", "t1", "t0"]


def test_p33_a_taskset_that_is_over_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    mix = mixed(tmp_path, (2, 1.0, 1), (6, 1.0, 1))
    tasks, cursors = mix.read({}, 6)
    assert Counter(name for name, _ in places(tasks)) == {"t0": 2, "t1": 4}
    assert cursors == {"t0": Cursor(1, 0), "t1": Cursor(0, 4)}
    assert [name for name, _ in places(mix.read(cursors, 6)[0])] == ["t1", "t1"]
    assert mix.read(mix.read(cursors, 6)[1], 6)[0] == []
