"""Log files stay small, whatever has them open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trinity_es.actors.guardian.log_size_limit import cut_long_files


def test_a_file_that_grew_too_long_is_cut_in_place_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab") as writer:
        writer.write(b"old\n" * 1000 + b"end\n")
        writer.flush()
        assert cut_long_files([str(path)], max_bytes=5000) == []
        assert cut_long_files([str(path)], max_bytes=100) == [str(path)]
        assert path.read_text().count("\n") == 1
        assert "this file was cut" in path.read_text()
        writer.write(b"new\n")
        writer.flush()
        assert path.read_text().endswith(".1)\nnew\n")
        kept = (tmp_path / "a.log.1").read_bytes()
        assert len(kept) == 100
        assert kept.endswith(b"old\nend\n")


def test_who_prints_straight_to_its_descriptor_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    code = "import os, sys\nfor line in sys.stdin: os.write(1, b'x' * 999 + b'\\n'); os.write(2, b'.\\n')"
    with path.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE
        )
    for _ in range(20):
        child.stdin.write(b"go\n")
        child.stdin.flush()
        child.stderr.readline()
        cut_long_files([str(path)], max_bytes=3000)
        assert path.stat().st_size < 4200
    child.stdin.close()
    child.stderr.close()
    assert child.wait() == 0


def test_what_can_not_be_kept_is_cut_all_the_same_and_what_is_missing_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 1000)
    (tmp_path / "a.log.1").mkdir()
    assert cut_long_files([str(tmp_path / "none.log"), str(path)], max_bytes=100) == [str(path)]
    assert "it is gone" in path.read_text()
    assert os.path.getsize(path) < 300
