"""The batch script for Slurm, on a Slurm of two nodes that is this machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.deployed import has_ended, made_run
from tests.helpers.of_the_day import LAUNCHERS, by_turns
from tests.helpers.paths import ROOT
from tests.helpers.servers import free_port
from tests.helpers.slurm import lacks, slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.skipif(bool(lacks()), reason=lacks())]
SCRIPT = str(ROOT / "deploy" / "slurm.sbatch")


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    folder = Path(tempfile.mkdtemp(prefix="es-slurm-"))  # short: paths of sockets are
    try:
        with slurm(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_slurm_would_start_the_script(env: dict[str, str]) -> None:
    done = subprocess.run(["sbatch", "--test-only", "--nodes=2", SCRIPT], env=env, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@by_turns("slurm", LAUNCHERS)
@pytest.mark.postgres
def test_the_script_plays_a_run_on_two_nodes(env: dict[str, str], postgres: Callable[[], str], tmp_path: Path) -> None:
    url, commands = postgres(), made_run(tmp_path)
    given = {**env, "PATH": f"{commands}:{env['PATH']}", "STORE_URL": url, "CONFIG": "config.yaml",
             "PORT": str(free_port())}
    done = subprocess.run(
        ["sbatch", "--wait", "--nodes=2", "--export=ALL", f"--output={tmp_path}/said", SCRIPT], env=given,
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = (tmp_path / "said").read_text()
    assert done.returncode == 0, (done.stderr, said)
    assert len(has_ended(url)) == 1, said
    assert (tmp_path / "trinity-es.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "trinity-es.key").read_text().strip() not in said
