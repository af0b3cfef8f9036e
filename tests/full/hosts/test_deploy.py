"""What stands in `deploy/`: read by the tools that it is for where they are here, and its commands run as processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers.hosts import KEY, free_port
from tests.helpers.paths import ROOT
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev

DEPLOY = ROOT / "deploy"
CLI = [sys.executable, "-m", "trinity_es.cli"]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "trinity-es.yaml").read_text()))


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours in these files, and where it stands."""
    for document in documents():
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            yield f"kubernetes {container['name']}", container["args"]
    yield "compose head", compose()["services"]["head"]["command"]
    texts = [DEPLOY / "compose.yaml", DEPLOY / "slurm.sbatch", DEPLOY / "skypilot.yaml"]
    for path in (*texts, *sorted((DEPLOY / "systemd").iterdir())):
        text = re.sub(r"\\\n", " ", path.read_text())
        for line in text.splitlines():
            found = re.search(r"(?<!name: )\btrinity-es ((?:run|join|up|resume) .*?)(?:'? &)?$", line)
            if found and not line.lstrip().startswith("#"):
                yield path.name, found[1].replace('\\"', '"').replace("'", "").replace('"', "").rstrip("]").split()


@pytest.mark.parametrize(("where", "words"), [pytest.param(*c, id=f"{c[0]} {c[1][0]}") for c in commands()])
def test_each_command_has_options_and_keys_that_there_are(where: str, words: list[str]) -> None:
    options = [w for w in words[1:] if w.startswith("--")]
    told = subprocess.run([*CLI, words[0], "--help"], capture_output=True, text=True, check=True).stdout
    assert [o for o in options if o not in told] == []
    for key in [words[n + 1].split("=")[0] for n, w in enumerate(words) if w == "--set"]:
        section: Any = Config
        for part in key.split("."):
            section = section.model_fields[part].annotation


def test_there_are_commands_of_each_file() -> None:
    assert {where.split()[0] for where, _ in commands()} == {
        "kubernetes", "compose", "compose.yaml", "slurm.sbatch", "skypilot.yaml", "trinity-es-head.service",
        "trinity-es-host.service"}


def test_what_kubernetes_is_told_fits_together() -> None:
    found = {(d["kind"], d["metadata"]["name"]): d for d in documents()}
    assert set(found) == {
        ("Service", "trinity-es-head"), ("Service", "trinity-es-host"), ("PersistentVolumeClaim", "trinity-es"),
        ("Job", "trinity-es-head"),
        ("StatefulSet", "trinity-es-host")}
    head, host = found["Job", "trinity-es-head"]["spec"], found["StatefulSet", "trinity-es-host"]["spec"]
    service = found["Service", "trinity-es-head"]["spec"]
    assert service["selector"] == head["template"]["metadata"]["labels"]
    assert host["selector"]["matchLabels"] == host["template"]["metadata"]["labels"]
    for pod in (head["template"]["spec"], host["template"]["spec"]):
        [container] = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        keys = {e["valueFrom"]["secretKeyRef"]["key"] for e in container["env"] if "secretKeyRef" in e["valueFrom"]}
        assert keys == {"key", "store-url"}
    [container] = head["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "hosts", "containerPort": 7700}]
    assert service["ports"] == [{"name": "hosts", "port": 7700, "targetPort": "hosts"}]
    words = host["template"]["spec"]["containers"][0]["args"]
    drain = int(words[words.index("--drain") + 1])
    assert host["template"]["spec"]["terminationGracePeriodSeconds"] > drain + 20


def test_bash_reads_the_script_for_slurm() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=True)


def test_systemd_reads_its_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    units = [str(path) for path in sorted((DEPLOY / "systemd").iterdir())]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert "trinity-es" not in done.stderr, done.stderr


def test_docker_reads_the_compose_file() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True,
                                                         check=False).returncode:
        pytest.skip("there is no `docker compose` here")
    env = {**os.environ, "TRINITY_ES_KEY": KEY, "POSTGRES_PASSWORD": "x"}
    done = subprocess.run(["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"], env=env,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_commands_of_the_compose_file_play_a_run(postgres: Callable[[], str], tmp_path: Path) -> None:
    url, port = postgres(), free_port()
    (tmp_path / "tasks.jsonl").write_text("".join('{"prompt": "1 + 1", "response": "2"}\n' for _ in range(16)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "mode": "explore", "total_steps": 4,
        "explorer": {"max_concurrency": 2, "rollout_model": {
            "engine_type": "scripted", "script": {"response": "2", "latency_seconds": 0.5}}},
        "buffer": {"batch_size": 4, "explorer_input": {"tasksets": [
            {"name": "sums", "path": "tasks.jsonl", "workflow": "math_workflow", "repeat_times": 4}]}},
        "trainer": {"class": None}, "synchronizer": {"sync_style": "fully_async", "max_inflight_batches": 4},
    }))
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "trinity-es").write_text(f"#!/bin/sh\nexec {sys.executable} -m trinity_es.cli \"$@\"\n")
    (binary / "trinity-es").chmod(0o755)
    services = compose()["services"]
    env = {**os.environ, "TRINITY_ES_KEY": KEY, "STORE_URL": url, "PATH": f"{binary}:{os.environ['PATH']}"}
    there = {"$$": "$", "head:7700": f"127.0.0.1:{port}", "0.0.0.0:7700": f"127.0.0.1:{port}",
             "/tmp/logs": str(tmp_path / "host-logs"), '"$(hostname)"': "b"}

    def words(given: list[str]) -> list[str]:
        for name, value in there.items():
            given = [word.replace(name, value) for word in given]
        return given

    host = subprocess.Popen(words(services["host"]["entrypoint"]), env=env, cwd=tmp_path)
    head = subprocess.Popen(["trinity-es", *words(services["head"]["command"])], env=env, cwd=tmp_path)
    try:
        assert head.wait(150) == 0
        with trinity_es.open_log(url) as log:
            assert [b.state for b in log.batches()] == ["finalized"] * 4
            assert [r.event.host for r in log.read(types=["HostJoined"]) if isinstance(r.event, ev.HostJoined)] == ["b"]
            assert log.verify() == []
    finally:
        head.kill()
        host.send_signal(signal.SIGTERM)
        host.wait(60)

