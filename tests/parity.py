"""The parity table, printed from test names (`test_p18_...`): `python -m tests.parity > docs/PARITY.md`."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, field
from functools import cache

from tests.helpers.paths import ROOT

__all__ = ["IN_THIS_PROCESS", "ROWS", "Row", "markdown", "rows"]

_SKIPS = re.compile(r"\bmark\.(skip|xfail)\b")

IN_THIS_PROCESS = {38, 54, 56}
"""Rows whose features need no actor system."""

FOUND_LATER = 39
"""The first of the rows that were found by running the known system's own tests against this one."""

ROWS: dict[int, str] = {
    1: "batch ids: a step, or a string that begins with one; their order",
    2: "`Task`: workflow, runs, arguments, reward, the sample; ids on submission",
    3: "`TaskWrapper`: a task's runs go out in units (`max_repeat_times_per_runner`)",
    4: "`Status`: completed runs of all, their metrics, a message; `ok`, `metric`",
    5: "`Experience`, `EID`: every field, in bytes and back; damage is a named error",
    6: "`BatchLifecycleState`: pending, running, finalizing, finalized, aborted",
    7: "`BatchState`: what a batch is, as a projection",
    8: "`run_task`: stamps, run and task metrics; evals keep no experiences; none at all is an error",
    9: "workflows: `can_reset`, `can_repeat`, `is_async`, constructor, `MultiTurnWorkflow`",
    10: "`concurrent_mode`: sequential, asynchronous, multi-threading",
    11: "`max_retry_times`: again elsewhere, and only what failed",
    12: "`max_timeout`: what hangs is ended, and its place is free",
    13: "`restart_runner`: a dead or hung runner is replaced",
    14: "runner states, and their periodic table",
    15: "auxiliary models; chat, generate, logprobs, OpenAI client",
    16: "scheduler: `start`, `stop`, and again",
    17: "`schedule`: lower batch first, then first in first out",
    18: "`get_results`: enough, a little longer, at last what there is",
    19: "`has_step`",
    20: "`wait_all`",
    21: "many batches and callers at once",
    22: "over-rollout: `ratio`, `wait_after_min`, `return_partial_tasks`",
    23: "dynamic timeout from what steps took",
    24: "coordinator: `prepare`, `shutdown`, `get_actor`; modes",
    25: "`submit_batch`: an active id is refused, an empty batch is legal",
    26: "`finalize_train_batch`: waits, times out and loses nothing, is the same again",
    27: "`finalize_eval_batch`",
    28: "`abort_batch`: with a result of what was done",
    29: "`process_experiences`: the pipeline",
    30: "train metrics, and suffixes that choose how they add up",
    31: "eval metrics: mean@n, std@n, best@k, worst@k",
    32: "`explore()`: the loop, with evals",
    33: "tasksets: files, shuffling, epochs, ratios, a cursor that is recovered",
    34: "weight sync: methods (nccl over gloo: between GPUs it never ran), styles, intervals; a failed one leaves "
        "engines serving",
    35: "`benchmark()`: checkpoints in order, or the newest",
    36: "`serve()`: an OpenAI-compatible proxy that records",
    37: "monitors: JSONL, tensorboard, wandb (trackio, mlflow, swanlab, too)",
    38: "`debug`: one task in this process",
    39: "a sync workflow's `convert_messages_to_experience`, also of auxiliary models",
    40: "`auxiliary_models` are OpenAI clients, `auxiliary_model_wrappers` the models; none is None",
    41: "scheduler names of 0.6: `get_payload_results`, `get_statuses`, `abort_batch`, `return_partial_tasks=`",
    42: "a Scheduler's `status.metrics[0]` is the task's aggregate",
    43: "`can_repeat` without `eid.run` completes all its runs; `task.rollout_args.n`",
    44: "`model.set_workflow_state`, `WorkflowRunner.get_runner_state`, `terminate_time`",
    45: "`Experience`: whole-numbered float tokens, vectors over all tokens, the default `prompt_length`",
    46: "`extract_experience_from_history()` after `chat`, `generate` and clients",
    47: "`Task.to_workflow`, `model_version_async`, `get_message_token_len`, known keywords",
    48: "conversations: templates that drop reasoning, more tokens than the context",
    49: "a task given up half done names the error and why",
    50: "tasksets as there: the last, incomplete batch, their order, `taskset_id`, selectors",
    51: "operators and advantages of 0.6, to the last digit; async ones, `prepare`, `close`, auxiliary models",
    52: "the known `TrinityClient` against `serve`: its key, `/metrics`",
    53: "metrics of the explorer: `rollout/model_version`, `explorer/time/wait_explore_step`, `explore/time/..`",
    54: "`to_hf_datasets`, `from_hf_datasets`",
    55: "OpenAI clients: penalties, `top_logprobs`, `response_format`, `chat_template_kwargs`, `min_tokens`",
    56: "a config with `${oc.env:...}`: all its problems in one round",
    57: "ready-made workflows and rewards: mathematics, GSM8K, multiple choice, countdown, code, tools",
}
"""Row by number."""


@dataclass(slots=True)
class Row:
    """A row, and its tests by file: the names, and how many of them are marked to be skipped."""

    number: int
    what: str
    tests: dict[str, list[str]] = field(default_factory=dict)
    skipped: int = 0

    @property
    def state(self) -> str:
        """`done` where a test on the real actor system has its number and none is skipped."""
        folders = ("tests/",) if self.number in IN_THIS_PROCESS else ("tests/main/", "tests/full/system/")
        return "done" if any(f.startswith(folders) for f in self.tests) and not self.skipped else "open"


def _is_skipped(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the test does not run: skip or xfail; `skipif` stands for a machine that lacks something."""
    return any(_SKIPS.search(ast.unparse(d)) for d in node.decorator_list)


def _all_skipped(module: ast.Module) -> bool:
    """Return True if a module's `pytestmark` skips it."""
    return any(
        isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
        and _SKIPS.search(ast.unparse(node.value)) for node in module.body
    )


@cache
def rows() -> list[Row]:
    """Return every row with the tests that have its number in their name."""
    found = {number: Row(number, what) for number, what in ROWS.items()}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        none_runs = _all_skipped(module)
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            match = re.match(r"test_((?:[a-z]\d+_)+)", node.name)
            for number in re.findall(r"p(\d+)_", match.group(1)) if match else ():
                row = found[int(number)]
                row.tests.setdefault(str(path.relative_to(ROOT)), []).append(node.name)
                row.skipped += none_runs or _is_skipped(node)
    return list(found.values())


def label(number: int) -> str:
    """The row's name; of P39 to P56 with M0 to M17 in brackets, as what the known system's own tests found."""
    return f"P{number}" + (f" (M{number - FOUND_LATER})" if FOUND_LATER <= number <= FOUND_LATER + 17 else "")


def markdown() -> str:
    """Return the page."""
    lines = [
        "# Parity",
        "",
        "What users of Trinity-RFT's explorer must find here, row by row, and the tests that show it: those whose",
        "names have the row's number (`pytest -k p18_`). A row is done when one of them runs on the real actor system",
        f"({', '.join(f'P{number}' for number in sorted(IN_THIS_PROCESS))}: without one). What has another name here,",
        "and why: [FROM_TRINITY_RFT.md](FROM_TRINITY_RFT.md).",
        "",
        "This page is printed by `python -m tests.parity`.",
        "",
        "| row | what | tests | state |",
        "|---|---|---|---|",
    ]
    for row in rows():
        tests = ", ".join(f"`{file.removeprefix('tests/')}`" for file in row.tests)
        lines.append(f"| {label(row.number)} | {row.what} | {tests} | {row.state} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
