"""What stands in `deploy/`: read by the tools that it is for where they are here, and its commands run as processes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.deployed import has_ended, made_run
from tests.helpers.hosts import KEY
from tests.helpers.namespaces import made_postgres
from tests.helpers.of_the_day import LAUNCHERS, by_turns
from tests.helpers.paths import ROOT
from tests.helpers.servers import free_port
from trinity_es.config.config import Config
from trinity_es.testing import wait_until

DEPLOY = ROOT / "deploy"
IMAGE_FOLDER = "/run/trinity"
"""The folder in which an image's commands run."""
CLI = [sys.executable, "-m", "trinity_es"]
DOCUMENTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "trinity-es.yaml").read_text()))
SKYPILOT, COMPOSE = (yaml.safe_load((DEPLOY / name).read_text()) for name in ("skypilot.yaml", "compose.yaml"))


def commands() -> Iterator[tuple[str, list[str]]]:
    for document in DOCUMENTS:
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            yield f"kubernetes {container['name']}", container["args"]
    yield "compose head", COMPOSE["services"]["head"]["command"]
    texts = [DEPLOY / "compose.yaml", DEPLOY / "slurm.sbatch", DEPLOY / "skypilot.yaml"]
    for path in (*texts, *sorted((DEPLOY / "systemd").iterdir())):
        text = re.sub(r"\\\n", " ", path.read_text())
        for line in text.splitlines():
            found = re.search(r"(?<!name: )\btrinity-es ((?:run|join|up|resume) .*?)(?:'? &|'?\s*#.*|\"\])?$", line)
            if found and not line.lstrip().startswith("#"):
                yield path.name, found[1].replace('\\"', '"').replace("'", "").replace('"', "").split()


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


def test_no_command_line_holds_a_secret() -> None:
    """Others on a host can read them: the store's URL, which may hold a password, comes by the environment."""
    for where, words in commands():
        assert not any(re.search(r"\$\(?\{?(STORE_URL|TRINITY_ES_KEY)\b", word) for word in words), where


def test_what_kubernetes_is_told_fits_together() -> None:
    found = {(d["kind"], d["metadata"]["name"]): d for d in DOCUMENTS}
    assert set(found) == {
        ("Service", "trinity-es-head"), ("Service", "trinity-es-host"), ("PersistentVolumeClaim", "trinity-es"),
        ("NetworkPolicy", "trinity-es-head"), ("Job", "trinity-es-head"), ("StatefulSet", "trinity-es-host")}
    head, host = found["Job", "trinity-es-head"]["spec"], found["StatefulSet", "trinity-es-host"]["spec"]
    service, policy = found["Service", "trinity-es-head"]["spec"], found["NetworkPolicy", "trinity-es-head"]["spec"]
    assert service["selector"] == head["template"]["metadata"]["labels"] == policy["podSelector"]["matchLabels"]
    assert host["selector"]["matchLabels"] == host["template"]["metadata"]["labels"]
    [[let_in]] = [rule["from"] for rule in policy["ingress"]]
    assert let_in["podSelector"]["matchLabels"] == host["template"]["metadata"]["labels"]
    for pod in (head["template"]["spec"], host["template"]["spec"]):
        [container] = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        keys = {e["valueFrom"]["secretKeyRef"]["key"] for e in container["env"] if "secretKeyRef" in e["valueFrom"]}
        assert keys == {"store-url"}
        mounts = {m["name"]: m for m in container["volumeMounts"]}
        assert mounts["run"] == {"name": "run", "mountPath": IMAGE_FOLDER}
        [secret] = [v["secret"] for v in pod["volumes"] if v["name"] == "key"]
        file = f"{mounts['key']['mountPath']}/{secret['items'][0]['path']}"
        assert any(word.endswith(file) for word in container["args"])
        assert "subPath" not in mounts["key"], "a file that is mounted so does not follow the Secret"
        assert secret["defaultMode"] == 0o440
    [container] = head["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "hosts", "containerPort": 7700}]
    assert service["ports"] == [{"name": "hosts", "port": 7700, "targetPort": "hosts"}]
    assert container["readinessProbe"]["tcpSocket"] == {"port": "hosts"}
    [config] = [m for m in container["volumeMounts"] if m["name"] == "config"]
    assert config["mountPath"] == f"{IMAGE_FOLDER}/{container['args'][1]}", "beside it the run writes"
    [container] = host["template"]["spec"]["containers"]
    words = container["args"]
    log_dir, drain = (words[words.index(option) + 1] for option in ("--log-dir", "--drain"))
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", f"{log_dir}/connected"]
    assert host["template"]["spec"]["terminationGracePeriodSeconds"] > int(drain) + 20


def by_tool(name: str, *words: str, **env: str) -> str:
    """What a tool says of a file; skipped by name where there is none."""
    tool = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip(f"there is no {name} here")
    done = subprocess.run([tool, *words], env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kubernetes_knows_all_of_it() -> None:
    """Against the schemas of the API, strictly: an unknown field is an error."""
    said = by_tool("kubernetes-validate", "--strict", str(DEPLOY / "kubernetes" / "trinity-es.yaml"))
    assert said.count("passed for resource") == len(DOCUMENTS)


def test_bash_reads_the_script_for_slurm() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=True)


@pytest.mark.parametrize(("tool", "file"), [("shellcheck", "slurm.sbatch"), ("hadolint", "Dockerfile")])
def test_a_tool_finds_nothing(tool: str, file: str) -> None:
    by_tool(tool, str(DEPLOY / file))


@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_finds_nothing_in_the_parts_for_skypilot(part: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\n# shellcheck disable=SC2016\n{SKYPILOT[part]}")
    by_tool("shellcheck", str(script))


def test_what_skypilot_is_told_is_what_it_knows() -> None:
    """By the names in its documentation: its package pins more than an environment of tests can have."""
    assert set(SKYPILOT) == {"name", "num_nodes", "resources", "workdir", "secrets", "setup", "run"}
    assert set(SKYPILOT["resources"]) == {"accelerators", "use_spot"}
    named = set(re.findall(r"\$\{?(\w+)", SKYPILOT["run"]))
    assert named == {"head", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "oc"}


def test_skypilot_takes_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky", reason="there is no skypilot here: it pins what these tests have newer")
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml_config({**SKYPILOT, "secrets": dict.fromkeys(SKYPILOT["secrets"], "x" * 40)})
    assert task.num_nodes == SKYPILOT["num_nodes"]


def test_the_image_holds_the_project_and_not_what_else_a_checkout_holds() -> None:
    """The folder of the build is the checkout; what is not tracked there would be gigabytes."""
    left_out = (DEPLOY / "Dockerfile.dockerignore").read_text().split("\n")
    for name in (".git", ".venv", "**/__pycache__"):
        assert name in left_out
    text = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["trinity-es"]' in text
    assert f"WORKDIR {IMAGE_FOLDER}\n" in text
    extras = re.findall(r"ARG \w+=(\S+)", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)


def test_systemd_reads_its_units() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    units = [str(path) for path in sorted((DEPLOY / "systemd").iterdir())]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert "trinity-es" not in done.stderr, done.stderr


def as_composed(password: str) -> dict[str, Any]:
    """The services as `docker compose` reads them: with their environment, and what is written once for all."""
    said = by_tool("docker-compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--format", "json",
                   TRINITY_ES_KEY=KEY, POSTGRES_PASSWORD=password)
    return dict(json.loads(said)["services"])


def seconds(given: str) -> int:
    return sum(int(n) * {"m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)([ms])", given))


def test_docker_reads_the_compose_file() -> None:
    services = as_composed("x" * 16)
    assert set(services) == {"database", "head", "host"}
    [drain] = re.findall(r"--drain (\d+)", services["host"]["entrypoint"][-1])
    assert seconds(services["host"]["stop_grace_period"]) > int(drain) + 20
    for name in ("head", "host"):
        assert services[name]["volumes"][0]["target"] == IMAGE_FOLDER


@by_turns("compose", LAUNCHERS)
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_of_the_compose_file_play_a_run(tmp_path: Path) -> None:
    """As processes, each with the environment that it has there and nothing else of ours; the database asks for the
    password of that environment."""
    password, port = secrets.token_hex(16), free_port()
    services, commands = as_composed(password), made_run(tmp_path)
    with made_postgres("127.0.0.1", free_port(), "127.0.0.1/32", password) as database:
        probe = tmp_path / "logs-b" / "connected"
        there = {"$$": "$", "head:7700": f"127.0.0.1:{port}", "0.0.0.0:7700": f"127.0.0.1:{port}", "7700": str(port),
                 "--drain 60": "--drain 5", "@database/": f"@127.0.0.1:{database.port}/"}

        def given(text: str, host: str) -> str:
            for name, value in {**there, "/tmp/logs": str(tmp_path / f"logs-{host}"), "$(hostname)": host}.items():
                text = text.replace(name, value)
            return text

        def start(service: str, host: str) -> subprocess.Popen[bytes]:
            told = services[service]
            words = told.get("entrypoint") or ["trinity-es", *told["command"]]  # the image's own
            env = {name: given(value, host) for name, value in told["environment"].items()}
            env |= {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(tmp_path), "HOSTNAME": host}
            return subprocess.Popen([given(word, host) for word in words], env=env, cwd=tmp_path)

        def is_healthy(service: str, host: str) -> bool:
            kind, *words = services[service]["healthcheck"]["test"]
            assert kind == "CMD"
            words = [given(word, host) for word in words]
            return subprocess.run(words, capture_output=True, check=False).returncode == 0

        started = [start("host", "b"), start("host", "c"), start("head", "head")]
        try:
            wait_until(lambda: is_healthy("head", "head"), "the head's probe", 90)
            wait_until(lambda: is_healthy("host", "b"), "the probe of a host", 90)
            assert probe.exists()
            assert started[2].wait(150) == 0
            assert has_ended(database.url) == {"b", "c"}
            wait_until(lambda: not is_healthy("host", "b"), "the probe of a host without a head", 60)
            assert not is_healthy("head", "head")
        finally:
            started[2].kill()
            for host in started[:2]:
                host.send_signal(signal.SIGTERM)
            for host in started[:2]:
                host.wait(90)
