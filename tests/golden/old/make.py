"""Makes old.tar.gz: two logs whose systems were killed with -9, written by the code that is on PYTHONPATH.

Made once, by the last release before all rooms became one package (commit 815ee8a), in a folder without history and on
a host without a name, and never again, but for another old release:

    unshare -u sh -c 'hostname old-host; cd tests/golden/old; PYTHONPATH=CHECKOUT python make.py /tmp/old'
"""

# mypy: ignore-errors
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil

import trinity_es
from trinity_es import Task, system

HERE = Path(__file__).parent
SIMPLE = "trinity_es.workflows_simple:SimpleWorkflow"
TURN = "trinity_es.workflows:SingleTurnWorkflow"
ASYNC = "trinity_es.workflows_simple:AsyncSimpleWorkflow"


def kill(folder, *more):
    """kill -9 of all that works in the folder."""
    victims = list(more)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.pid != os.getpid():
                victims.append(process)
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(victims, timeout=10)


def run(folder):
    """A run that dies in its third step: two steps trained, their weights published, an eval done."""
    rows = [json.dumps({"prompt": f"question {i}", "answer": "x"}) for i in range(14)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "eval.jsonl").write_text("\n".join(rows[:4]))
    with subprocess.Popen([sys.executable, "-m", "trinity_es.cli", "run", "run.yaml"], cwd=folder) as running:
        while True:
            time.sleep(0.02)
            assert running.poll() is None
            with contextlib.suppress(trinity_es.TrinityError), trinity_es.open_log("sqlite:///run/log.sqlite") as log:
                done = [r for r in log.read(types=["TaskFinished"]) if r.stream == "batch/3"]
                if len(done) >= 1:
                    break
        kill(folder, psutil.Process(running.pid))


def batches(folder):
    """A batch that ended, one with a failed task, one that was aborted, and one of which three of six tasks ended."""
    config = trinity_es.load_config("batches.yaml")
    system.start(config)
    client = trinity_es.connect(config)
    client.wait_ready()

    def task(prompt, workflow, **more):
        return Task(
            workflow=workflow, raw_task={"prompt": prompt, "answer": "x"}, reward_fn="letters:early",
            format_args={"prompt_key": "prompt", "response_key": "answer"}, rollout_args={"max_tokens": 8}, **more,
        )

    three = [task(f"{i} of three", w, repeat_times=2) for i, w in enumerate((SIMPLE, TURN, ASYNC))]
    client.submit_batch(batch_id=1, tasks=three, batch_type="train")
    client.finalize_train_batch(1)
    client.acknowledge(1, step=1)
    bad = Task(workflow=SIMPLE, raw_task={"prompt": "no reward"}, format_args={"prompt_key": "prompt"})
    client.submit_batch(batch_id=2, tasks=[*three, bad], batch_type="train")
    client.finalize_train_batch(2)
    client.submit_batch(batch_id=3, tasks=[task("slow", SIMPLE)], batch_type="train")
    client.abort_batch(3, reason="not wanted")
    slow = [task(f"slow {i}", w) for i, w in enumerate((SIMPLE, TURN, ASYNC))]
    client.submit_batch(batch_id=4, tasks=[*three, *slow], batch_type="train")
    while client.batch(4).completed_task_count < 3:
        time.sleep(0.01)
    kill(folder)


def nobody(member):
    return member.replace(uid=0, gid=0, uname="", gname="", deep=False)


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("letters.py", "run.yaml", "batches.yaml"):
        shutil.copy(HERE / name, folder)
    os.chdir(folder)
    run(folder)
    batches(folder)
    kept = [p for p in sorted(folder.rglob("*")) if p.is_file() and "logs" not in p.relative_to(folder).parts
            and "__pycache__" not in p.parts]
    with tarfile.open(HERE / "old.tar.gz", "w:gz") as archive:
        for path in kept:
            archive.add(path, path.relative_to(folder), filter=nobody)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
