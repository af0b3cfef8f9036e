"""The folder of `trinity-es demo`: creation of its files, and the verdict on the finished run.

Its subfolder `grpo/` is a copy of examples/grpo (of the checkout or the installed package) for the user to change. The
config names classes of that copy.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, TrinityError
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = ["STEPS", "Demo", "EngineName", "draw", "find", "find_examples", "judge", "make", "running_server"]

EngineName = Literal["vllm", "http", "scripted"]
SERVE_SCRIPT = "serve.sh"
"""Script in the folder that starts a vLLM server, for a demo with engine http."""
STEPS = 160
SERVER_END_SECONDS = 10.0
"""How long the vLLM server may take to end after SIGTERM; then it is killed."""
CHANCE_REWARD, LEARNED_REWARD = 0.05, 0.7
"""A model has learned if its eval reward is below the first before training, and at least the second after it."""
MAX_EVALS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Folder and settings of a demo."""

    folder: Path
    config: Path
    steps: int
    learns: bool
    """False for the scripted engine, which can't learn."""


def find_examples() -> Path:
    """Return the folder of the demo's code, examples/grpo in a checkout. Raises TrinityError."""
    folder = Path(__file__).parents[1] / "_demo"
    if not (folder / "tiny_model.py").is_file():
        raise TrinityError(f"the demo's code is missing from this installation (no tiny_model.py in {folder}): install "
                           "trinity-es again, or run from a checkout")
    return folder


def make(folder: Path | None, *, seed: int, steps: int | None, engine: EngineName) -> Demo:
    """Create the folder with model, tasksets, code and config. Raises ConfigError if it exists and is not empty."""
    folder = (folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and is not empty: choose a new folder with --dir")
    source = find_examples()
    needed = () if engine == "scripted" else ("vllm", "torch")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise TrinityError(f"{missing[0]} is not installed: `trinity-es doctor` says how to install it, and "
                           "`--engine scripted` works without it")
    step_count = steps or STEPS
    (folder / "grpo").mkdir(parents=True)
    for file in sorted(source.glob("*.py")):
        shutil.copy(file, folder / "grpo" / file.name)
    (folder / "grpo" / "__init__.py").touch()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        importlib.import_module("grpo.taskset").write_taskset(folder / "data", seed=seed)
        if engine != "scripted":
            importlib.import_module("grpo.tiny_model").make_tiny_model(folder / "model", seed=seed)
    finally:
        sys.path.remove(str(folder))
    config = folder / "config.yaml"
    port = _free_port() if engine == "http" else 0
    config.write_text(_config_text(seed=seed, steps=step_count, engine=engine, port=port))
    if engine == "http":
        script = folder / SERVE_SCRIPT
        script.write_text(_SERVE.format(python=shlex.quote(sys.executable), folder=shlex.quote(str(folder)), port=port))
        script.chmod(0o755)
    return Demo(folder=folder, config=config, steps=step_count, learns=engine != "scripted")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(demo: Demo) -> Iterator[None]:
    """Run the vLLM server of a demo with engine http during a `with` block. Does nothing for other engines."""
    script = demo.folder / SERVE_SCRIPT
    if not script.is_file():
        yield
        return
    with (demo.folder / "server.log").open("ab") as log:
        server = subprocess.Popen([script], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(SERVER_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def find(settings: Config) -> Demo | None:
    """Return the demo to which this config belongs; None if it is not the config of a demo."""
    folder = Path(settings.code_path)
    config = folder / "config.yaml"
    may_be_demo = settings.project == PROJECT and settings.name == NAME and settings.total_steps is not None
    if not (may_be_demo and config.is_file() and config.read_text().startswith(FIRST_LINE)):
        return None
    engine = settings.explorer.rollout_model.engine_type
    return Demo(folder=folder, config=config, steps=settings.total_steps or STEPS, learns=engine != "scripted")


def eval_interval(steps: int) -> int:
    """Return the number of steps between evals: the divisor of `steps` nearest to 20 with at most MAX_EVALS evals.

    A divisor makes the last eval measure the last weights.
    """
    divisors = [d for d in range(1, steps + 1) if steps % d == 0 and steps // d <= MAX_EVALS]
    return min(divisors, key=lambda d: abs(d - 20))


_VLLM_ENGINE = """\
  rollout_model:
    engine_type: vllm
    dtype: float32
    enforce_eager: true        # so small a model gains nothing from compilation
    seed: {seed}
    max_model_len: 64
    max_response_tokens: 8
    temperature: 1.0
    gpu_memory_utilization: 0.3
    engine_args:
      max_num_seqs: 256
"""

_HTTP_ENGINE = """\
  rollout_model:
    engine_type: http          # a vLLM server: ./serve.sh starts it
    servers:
      urls: ["http://127.0.0.1:{port}"]
    max_response_tokens: 8
    temperature: 1.0
"""

_SERVE = """\
#!/bin/sh
# Starts the vLLM server of this demo. VLLM_SERVER_DEV_MODE lets it load new weights while it runs, and
# --enable-scale-out makes it report which weights made which token. On a CPU, a model that shares its embedding with
# its output layer needs --worker-extension-cls.
cd {folder}
export VLLM_SERVER_DEV_MODE=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
exec {python} -W ignore -m vllm.entrypoints.openai.api_server --model {folder}/model \\
  --host 127.0.0.1 --port {port} --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 \\
  --worker-extension-cls trinity_es.actors.engines.vllm.weights.WorkerExtension \\
  --dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 256 --gpu-memory-utilization 0.3
"""

_SCRIPTED_ENGINE = """\
  rollout_model:
    engine_type: scripted      # plays a script: nothing is learned
    seed: {seed}
    max_response_tokens: 8
"""

_TRAINER = """\
trainer:
  class: grpo.trainer:GRPOTrainer
  args: {{lr: 0.002, clip: 0.2, entropy: 0.03, max_grad_norm: 1.0, seed: {seed}}}
model:
  model_path: ./model
"""

PROJECT, NAME = "letters", "first"
FIRST_LINE = "# Made by `trinity-es demo`."
_CONFIG = FIRST_LINE + """ All files that it names are in this folder, and yours to change.
# Run it again under another name: trinity-es run config.yaml --set name=second
project: {project}
name: {name}
mode: both
total_steps: {steps}
explorer:
  eval_interval: {interval}
  eval_on_startup: true
{engine}buffer:
  batch_size: 32
  explorer_input:
    tasksets:
      - name: letters
        path: data/train.jsonl
        repeat_times: 8          # runs of each task: the group of GRPO
        reward_fn: grpo.reward:letter_share
        shuffle: true
        seed: {seed}
        epochs: null             # repeat it until total_steps
    eval_tasksets:
      - name: letters
        path: data/eval.jsonl
        repeat_times: 4
        reward_fn: grpo.reward:letter_share
  pipeline:
    operators:
      - name: grpo
{trainer}"""


def _config_text(*, seed: int, steps: int, engine: EngineName, port: int = 0) -> str:
    engines = {"vllm": _VLLM_ENGINE, "http": _HTTP_ENGINE, "scripted": _SCRIPTED_ENGINE}
    return _CONFIG.format(
        project=PROJECT, name=NAME, seed=seed, steps=steps, interval=eval_interval(steps),
        engine=engines[engine].format(seed=seed, port=port),
        trainer=_TRAINER.format(seed=seed) if engine != "scripted" else "",
    )


def draw(rows: Sequence[BatchRow], path: Path) -> str | None:
    """Draw the reward curve to an image file and return its path; None if matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    train, evals = ([(int(str(b.batch_id).partition("/")[0]), b.reward) for b in rows  # (step, reward)
                     if b.batch_type == batch_type and b.reward is not None] for batch_type in ("train", "eval"))
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot([s for s, _ in train], [r for _, r in train], color="#4c78a8", linewidth=1.2, label="train, each step")
    axes.plot([s for s, _ in evals], [r for _, r in evals], "o--", color="#e45756", label="eval")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02), title="reward, from the log")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return str(path)


def judge(summary: dict[str, Any], *, steps: int, learns: bool) -> tuple[bool | None, str]:
    """Decide from a `run_summary` whether the model learned its task. Returns the decision and its text.

    The decision is None if the run is too short, or can't learn.
    """
    before, after = summary["eval_reward_before"], summary["eval_reward_after"]
    if not learns:
        return None, "The scripted engine cannot learn: this run showed the commands only."
    if before is None or after is None:
        return False, "THE MODEL WAS NOT JUDGED: the log lacks the eval before or after training."
    change = f"the eval reward went from {before:z.3f} to {after:z.3f} in {steps} steps"
    if before < CHANCE_REWARD and after >= LEARNED_REWARD:
        return True, f"The model learned its task: {change}."
    if steps < STEPS:
        return None, f"{steps} steps are too few to learn the task: {change}. The default is {STEPS}."
    return False, (f"THE MODEL DID NOT LEARN ITS TASK: {change}. Expected: from below {CHANCE_REWARD} to at least "
                   f"{LEARNED_REWARD}.")
