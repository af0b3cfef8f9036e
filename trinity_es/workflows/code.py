"""Code judged by unit tests: the model writes a program, which runs within limits in its own processes.

A program that is too slow, takes too much memory or crashes is wrong. If the machine has too little memory or time to
judge it, the run fails with kind `grader`.

This is no sandbox. The program runs as the user of the engines, in its own folder, with limits on CPU time, memory and
output. Python hooks (`judged_program.py`) refuse processes, sockets and changes of other files, which stops accidents.
If a model may be an attacker, run the whole system in a container without a network.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_es.events.errors import DataError
from trinity_es.events.processes import end_with_parent
from trinity_es.events.values import Task
from trinity_es.workflows.rewards import RewardFn
from trinity_es.workflows.simple import AsyncSimpleWorkflow, SimpleWorkflow

__all__ = ["AsyncCodeWorkflow", "CodeReward", "CodeWorkflow"]

_PROMPT = "Write a Python program that solves the task. Put all of it into one block that begins with ```python."

WRITTEN_BYTES = 16 * 1024**2
"""Maximum size of a file that a program writes, including its output."""


class CodeReward(RewardFn):
    """`accuracy`: 1 if the program passes all tests; with `partial` the share of passed tests.

    The program is the last ```python block of the response, else its last block, else all of it. The truth is a list of
    tests (`assert add(1, 2) == 3`) that use the program's names, or one text of them; or `{"inputs": [...], "outputs":
    [...]}`, texts that the program reads and must print; or JSON of these. Each test may take `seconds` of CPU time and
    `memory` MiB, and all tests together `total_seconds`. A hanging test counts with its wall-clock time. Tests for
    which no time is left count as failed.
    """

    @staticmethod
    def grader_timeout(seconds: float = 4.0, total_seconds: float = 100.0, **kwargs: Any) -> float:
        """Return the time limit for judging, which is enough if programs get at least a quarter of a core."""
        return 4 * total_seconds + _wall_seconds(seconds) + 30

    def __init__(
        self, seconds: float = 4.0, memory: int = 1024, partial: bool = False, total_seconds: float = 100.0,
        **kwargs: Any,
    ) -> None:
        self.seconds, self.memory, self.partial, self.total_seconds = seconds, memory, partial, total_seconds

    def __call__(self, response: str, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        checks = _checks(truth)
        blocks = re.findall(r"```([^\n`]*)\n(.*?)```", response, re.DOTALL)
        python_blocks = [text for name, text in blocks if name.strip().lower() in ("python", "py", "python3")]
        program = (python_blocks or [text for _, text in blocks] or [response])[-1]
        passed_count = 0
        with tempfile.TemporaryDirectory(prefix="judged-") as folder:
            judge = _Judge(Path(folder), self.seconds, self.memory)
            for check in checks:
                has_passed = judge.passes(program, check)
                passed_count += has_passed
                if (not has_passed and not self.partial) or judge.spent_seconds > self.total_seconds:
                    break
        return {"accuracy": passed_count / len(checks) if self.partial else float(passed_count == len(checks))}


_Check = str | tuple[Any, Any]
"""A test that asserts, or a program's input and expected output."""


class _Judge:
    """Runner of one program's tests, one after the other, in a folder.

    `spent_seconds`: CPU time of the tests so far; a test that hung counts with its wall-clock time.
    """

    def __init__(self, folder: Path, seconds: float, memory: int) -> None:
        self.folder, self.seconds, self.memory = folder, seconds, memory
        self.spent_seconds = 0.0

    def passes(self, program: str, check: _Check) -> bool:
        """Return True if the program passes a test. Raises TimeoutError if the machine is too busy."""
        if isinstance(check, str):
            verdict = secrets.token_hex(16)
            output = self._output(f"{verdict}\n", program, check)
            return output is not None and output.rstrip().endswith(verdict)
        stdin, expected = check
        output = self._output(_as_text(stdin), program)
        return output is not None and output.split() == _as_text(expected).split()

    def _output(self, stdin_text: str, *sources: str) -> str | None:
        """Run `sources` (the program, and its test if there is one) on this input. Return the output, None on failure.

        Raises TimeoutError if the machine was too busy, ChildProcessError if the kernel killed the program.
        """
        script = str(Path(__file__).with_name("judged_program.py"))
        folder, run_folder = self.folder, self.folder / "run"
        run_folder.mkdir(exist_ok=True)
        home = str(run_folder)
        files = [str(folder / name) for name in ("solution.py", "tests.py")[: len(sources)]]
        for file, source in zip(files, sources, strict=True):
            Path(file).write_text(source, encoding="utf-8", errors="surrogatepass")
        (folder / "stdin").write_text(stdin_text, errors="surrogatepass")
        cpu_seconds_before, hung_seconds = _cpu_seconds(), 0.0
        with (folder / "stdin").open("rb") as stdin, (folder / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", script, *files], stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL,
                cwd=run_folder, env={"HOME": home, "TMPDIR": home, "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
                start_new_session=True, preexec_fn=self._limit_setter(os.getpid()),
            )
            try:
                status = process.wait(_wall_seconds(self.seconds))
            except subprocess.TimeoutExpired:
                if _process_state(process.pid) != "S":  # it wants to run, and never got its CPU time
                    raise TimeoutError(
                        f"a judged program got less than {self.seconds:g} s of CPU time, because the machine is "
                        "overloaded") from None
                status, hung_seconds = None, _wall_seconds(self.seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        used_seconds = _cpu_seconds() - cpu_seconds_before
        # The hard limit of CPU time, which kills too, is a second later.
        if status == -signal.SIGKILL and used_seconds < max(1, round(self.seconds)):
            raise ChildProcessError("a judged program was killed: is the machine out of memory?")
        self.spent_seconds += hung_seconds or used_seconds
        return (folder / "stdout").read_text(errors="replace") if status == 0 else None

    def _limit_setter(self, parent_pid: int) -> Callable[[], None]:
        """Return a function that sets limits for the process that calls it, and ties its life to its parent's."""
        seconds = max(1, round(self.seconds))
        limits = {
            resource.RLIMIT_CPU: (seconds, seconds + 1), resource.RLIMIT_AS: (self.memory << 20,) * 2,
            resource.RLIMIT_FSIZE: (WRITTEN_BYTES,) * 2, resource.RLIMIT_CORE: (0, 0),
        }

        def limit() -> None:
            end_with_parent(parent_pid)
            for name, values in limits.items():
                resource.setrlimit(name, values)

        return limit


def _wall_seconds(seconds: float) -> float:
    """Return the wall-clock limit for a test: enough for a program that gets a quarter of a core."""
    return 4 * seconds + 2


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class CodeWorkflow(SimpleWorkflow):
    """Workflow that asks for a Python program; reward: `code_reward`."""

    default_reward = "code_reward"

    def reset(self, task: Task) -> None:
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = _PROMPT


class AsyncCodeWorkflow(AsyncSimpleWorkflow, CodeWorkflow):
    """Async variant of CodeWorkflow, which plays each run on the runner's event loop."""


def _checks(truth: Any) -> list[_Check]:
    """Return the tests in a row's answer, which has one of the forms in `CodeReward`. Raises DataError."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    if isinstance(truth, str):
        truth = [truth]
    checks: list[_Check] = []
    if isinstance(truth, dict) and truth.get("fn_name"):
        raise DataError(f"the row's tests are inputs of the function {truth['fn_name']!r}, which no check supports: in "
                        "the column of format.response_key, write each test as code, as in `assert add(1, 2) == 3`")
    inputs, outputs = (truth.get("inputs"), truth.get("outputs")) if isinstance(truth, dict) else (None, None)
    if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
        checks = list(zip(inputs, outputs, strict=True))
    elif isinstance(truth, list) and all(isinstance(test, str) for test in truth):
        checks = [_valid_test(test) for test in truth]
    if not checks:
        raise DataError(f"the row's tests are {str(truth)[:60]!r}: a list of texts with code, or `inputs` and as many "
                        "`outputs`, is expected (format.response_key)")
    return checks


def _valid_test(test: str) -> str:
    """Return the test. Raises DataError if it is invalid Python, or if every program would pass it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(test, "tests.py", "exec")
            parsed = ast.parse(test)
    except (SyntaxError, ValueError) as e:
        raise DataError(f"the row's test {test[:200]!r} is not valid Python ({e}): fix the row "
                        "(format.response_key)") from e
    if not any(map(_checks_something, parsed.body)):
        names = [node.name for node in parsed.body if isinstance(node, _DEFINITIONS)]
        advice = f"add a line that calls {names[0]}" if names else "write an `assert`"
        raise DataError(f"the row's test {test[:200]!r} checks nothing, so every program would pass it: {advice} "
                        "(format.response_key)")
    return test


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _checks_something(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assert(test=test):
            return not (isinstance(test, ast.Constant) and test.value)
        case ast.Raise():
            return True
        case ast.Expr(value=value):
            return any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(value))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return False
        case ast.If(test=test) if "__name__" in ast.unparse(test):  # tests run as a module of another name
            return False
    # The statements of `except` and `case` are children of these parts, not of the statement.
    parts = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.excepthandler | ast.match_case)]
    return any(_checks_something(inner) for part in (statement, *parts) for inner in ast.iter_child_nodes(part)
               if isinstance(inner, ast.stmt))


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _process_state(pid: int) -> str:
    """Return the state of a process in /proc, such as R (runs or could run) or S (waits); S if it has ended."""
    try:
        text: str = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "S"
    return text[text.rfind(")") + 2]
