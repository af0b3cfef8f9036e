"""P57: programs judged by unit tests. What a program does is its own matter, what the judge fails to do is not."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.ready_made import Answers, played, rewards
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.events.errors import DataError
from trinity_es.testing import wait_until
from trinity_es.workflows import code
from trinity_es.workflows.code import CodeReward

ADDS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
DOUBLES = {"inputs": ["2\n", ["3", "x"]], "outputs": ["4\n", ["6"]]}
GOOD = "def add(a, b):\n    return a + b"


def block(text: str, name: str = "python") -> str:
    return f"Here it is:\n```{name}\n{text}\n```\nIt adds."


def judged(response: str, truth: Any = ADDS, **arguments: Any) -> float:
    return CodeReward(**{"seconds": 1.0, "memory": 512, **arguments})(response=response, truth=truth)["accuracy"]


@pytest.mark.parametrize("kind", ["", "async_"])
async def test_a_program_that_passes_its_tests_is_right(pool: WorkerPool, kind: str) -> None:
    answers = [block(GOOD), block(GOOD.replace("+", "-")), block("def add("), "no program"]
    task = {"raw_task": {"prompt": "Add.", "answer": ADDS}}
    assert await rewards(pool, f"{kind}code_workflow", answers, **task) == [1, 0, 0, 0]


@pytest.mark.parametrize(("response", "truth", "accuracy", "share"), [
    (GOOD, ADDS, 1, 1), (GOOD, "\n".join(ADDS), 1, 1), (GOOD, json.dumps(ADDS), 1, 1),
    ("def add(a, b):\n    return 3", ADDS, 0, 0.5),
    (block(GOOD, ""), ADDS, 1, 1), (block(GOOD, "py"), ADDS, 1, 1), (block("print('x')\n" + GOOD), ADDS, 1, 1),
    (block("1/0") + block(GOOD), ADDS, 1, 1), (block(GOOD) + block("$ ls", "sh"), ADDS, 1, 1),
    ("print(int(input()) * 2)", DOUBLES, 1, 1), ("print(int(input()) * 2)", json.dumps(DOUBLES), 1, 1),
    ("if __name__ == '__main__':\n    print(int(input()) * 2, '')", DOUBLES, 1, 1),
    ("print(4)", DOUBLES, 0, 0.5), ("print(int(input()) * 2); exit(1)", DOUBLES, 0, 0),
])
def test_the_last_python_block_is_judged(response: str, truth: Any, accuracy: float, share: float) -> None:
    assert judged(response, truth) == accuracy
    assert judged(response, truth, partial=True) == share


@pytest.mark.parametrize("program", [
    "while True: pass", "import time; time.sleep(60)", "x = [0] * 10**10",
    "x = []\nwhile True: x.append(bytearray(2**20))", "import os; os._exit(0)", "raise SystemExit(0)",
    "import os; os.abort()", "print('x' * 10**8)", "import sys; sys.stdin.read()",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "import os; os.close(1)", "def add(a, b): return add(a, b)", "print(open('/proc/self/cmdline').read())",
    *(f"{trick}\n{GOOD}" for trick in (
        "import signal\nsignal.raise_signal(9)", "import _signal\n_signal.raise_signal(9)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        "import os\nos.kill(0, 9)", "import trinity_es_is_not_here",
    )),
])
def test_a_program_that_hangs_crashes_floods_ends_early_or_kills_itself_is_wrong(program: str) -> None:
    assert judged(program) == 0


WAITS = "import time\nn = int(input())\nif n == 9: time.sleep(3600)\nprint(n * 2)"
BURNS = "import time\nn = int(input())\nwhile time.process_time() < 0.4: pass\nprint(n * 2)"


@pytest.mark.parametrize(("program", "partial", "accuracy"), [
    (WAITS, True, 1 / 6), (WAITS, False, 0.0), (BURNS, False, 0.0), (BURNS, True, 3 / 6),
])
def test_tests_left_when_a_program_has_used_up_its_time_failed(program: str, partial: bool, accuracy: float) -> None:
    truth = {"inputs": ["1", "9", "9", "1", "1", "1"], "outputs": ["2", "18", "18", "2", "2", "2"]}
    limits = {"seconds": 0.5, "total_seconds": 6.0} if program is WAITS else {"seconds": 8.0, "total_seconds": 1.0}
    found = judged(block(program), truth, partial=partial, **limits)
    assert found == accuracy if program is WAITS else found <= accuracy  # 0.4 s, and what an interpreter takes


async def test_a_program_that_hangs_in_many_tests_is_wrong_before_its_grader_is_killed(pool: WorkerPool) -> None:
    tests = {"inputs": ["9"] * 50, "outputs": ["18"] * 50}  # 3 s each
    arguments = {"seconds": 0.25, "total_seconds": 2.0, "partial": True}
    task = {"raw_task": {"prompt": "Double.", "answer": tests}, "reward_fn_args": arguments}
    assert await rewards(pool, "async_code_workflow", [block(WAITS)], **task) == [0.0]
    assert CodeReward.grader_timeout(**arguments) > 4 * 2.0 + (4 * 0.25 + 2)


@pytest.mark.parametrize("attempt", [
    "open({path!r}, 'w').write('x')", "import os; os.remove({path!r})", "import os; os.rename({path!r}, 'mine')",
    "import shutil; shutil.rmtree({folder!r})", "import pathlib; pathlib.Path({path!r}).unlink()",
    "import os; os.truncate({path!r}, 0)", "import os; os.open({path!r}, os.O_WRONLY | os.O_TRUNC)",
    "import subprocess; subprocess.run(['rm', {path!r}])", "import os; os.system('rm ' + {path!r})",
    "import os\nif os.fork() == 0: os._exit(0)", "import os; os.kill(os.getppid(), 9)",
    "import socket; socket.create_connection(('127.0.0.1', 9))", "import ctypes; ctypes.CDLL(None)",
])
def test_what_a_program_has_no_business_with_is_refused(attempt: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    tried = attempt.format(path=str(tmp_path / "kept"), folder=str(tmp_path))
    caught = "\n    ".join(tried.splitlines())
    program = f"{GOOD}\nrefused = False\ntry:\n    {caught}\nexcept PermissionError:\n    refused = True"
    assert judged(program, ["assert refused", *ADDS]) == 1
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_program_has_neither_the_environment_nor_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    check = "import os, sys\nassert 'SECRET' not in os.environ and len(sys.argv) == 1 and not sys.stdin.read()"
    assert judged(GOOD, [check]) == 1


def test_a_machine_without_time_for_a_program_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_process_state", lambda pid: "R")
    with pytest.raises(TimeoutError, match="a judged program got less than 1 s of CPU time"):
        judged("import time; time.sleep(60)", seconds=1.0)


def test_no_program_is_left_behind() -> None:
    program = "import time\nopen('pid', 'w').write('x')\ntime.sleep(3600)"
    assert judged(program, seconds=0.5) == 0
    mine = psutil.Process(os.getpid())
    wait_until(lambda: not [p for p in mine.children() if "judged_program.py" in command_of(p)], "their ends")


def command_of(process: psutil.Process) -> str:
    """Its command line; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie, too
        return ""


@pytest.mark.parametrize("program", [
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Both:\n    a: int\n    b: int\n\n\n"
    "def add(a, b):\n    both = Both(a, b)\n    return both.a + both.b",
    "import pickle\n\n\nclass Kept:\n    pass\n\n\ndef add(a, b):\n    kept = Kept()\n    kept.sum = a + b\n"
    "    return pickle.loads(pickle.dumps(kept)).sum",
    "import asyncio\n\n\nasync def added(a, b):\n    return a + b\n\n\n"
    "def add(a, b):\n    return asyncio.run(added(a, b))",
    "def add(a: int, b: int) -> int:\n    return a + b if add.__annotations__['a'] is int else 0",
    GOOD + "\nimport numpy, tempfile\nopen('a', 'w').write('1')\nassert open('a').read() == '1'\n"
    "with tempfile.TemporaryFile() as f:\n    f.write(b'x')\n",
], ids=["dataclass", "pickle", "asyncio", "annotations", "files in its folder, and what is installed"])
def test_what_plain_python_does_a_judged_program_may(program: str) -> None:
    assert judged(program) == 1


async def test_a_program_that_the_machine_kills_has_no_verdict(pool: WorkerPool) -> None:
    task = {"raw_task": {"prompt": "Add.", "answer": ADDS}, "reward_fn_args": {"seconds": 20.0}}
    program = block("import time; time.sleep(20)\n" + GOOD)
    playing = asyncio.ensure_future(played(pool, "async_code_workflow", Answers(program), **task))
    try:
        victim = await asyncio.to_thread(wait_until, _judged_process, "the judged program", 60)
        victim.kill()
        done = await playing
    finally:
        playing.cancel()
    assert [kind for _, kind, _ in done.failures] == ["grader"]
    assert "a judged program was killed: is" in done.failures[0][2]


def _judged_process() -> psutil.Process | None:
    ours = psutil.Process().children(recursive=True)
    return next((p for p in ours if "judged_program.py" in command_of(p)), None)


@pytest.mark.parametrize(("truth", "says"), [
    ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "inputs of the function 'add', .* write each test"),
    *((truth, "the row's tests are ") for truth in (
        None, 5, [], [1], {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, {"inputs": 3},
        {"inputs": ["1"], "outputs": None})),
    *(([*ADDS, test], "is not valid Python") for test in ("assert add(1, 2 == 3", "assert add(1, 2) = 3", "assert\0")),
])
def test_tests_that_can_not_be_played_are_the_datas_fault_and_no_zero(truth: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        judged(GOOD, truth)


@pytest.mark.parametrize("test", [
    "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "EPS = float('1e-6')\ndef test_add():\n    assert add(1, 2) == 3",
    "", "# todo", "'''assert add(1, 2) == 3'''", "import math", "x = add(1, 2)", "assert True", "pass",
    "class Test:\n    def test(self):\n        assert 0", "if __name__ == '__main__':\n    assert add(1, 2) == 3",
])
@pytest.mark.parametrize("partial", [False, True])
def test_a_test_that_checks_nothing_is_the_datas_fault_and_no_reward(test: str, partial: bool) -> None:
    for truth in (test, [test], [*ADDS, test]):
        with pytest.raises(DataError, match=r"checks nothing, so every program would pass it: (add a line|write an)"):
            judged(GOOD, truth, partial=partial)


@pytest.mark.parametrize("test", [
    "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    "for n in (1, 2):\n    assert add(n, n) == 2 * n", "try:\n    add(1, 2)\nfinally:\n    assert add(1, 2) == 3",
    "if add(1, 2) != 3:\n    raise ValueError",
    "match add(1, 2):\n    case 3:\n        pass\n    case _:\n        assert False, 'no sum'",
])
def test_a_test_that_checks_something_is_played(test: str) -> None:
    assert judged(GOOD, test) == 1
    assert judged("def add(a, b): return 0", test) == 0


async def test_a_program_ends_with_a_run_that_is_given_up(pool: WorkerPool) -> None:
    task = {"raw_task": {"prompt": "Add.", "answer": ADDS}, "reward_fn_args": {"grader_timeout": 1.0, "seconds": 30.0}}
    began = time.monotonic()
    done = await played(pool, "async_code_workflow", Answers(block("import time; time.sleep(3600)")), **task)
    assert [kind for _, kind, _ in done.failures] == ["grader"]
    assert time.monotonic() - began < 30
    running = [p for p in psutil.process_iter(["cmdline"]) if "judged_program.py" in " ".join(p.info["cmdline"] or ())]
    wait_until(lambda: not [p for p in running if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "its end")
