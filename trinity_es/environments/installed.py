"""Environments that are installed: each a Python environment of its own (a venv), for its pins are not ours.

They are folders below `TRINITY_ES_ENVIRONMENTS` or, without that, `trinity_es/environments` in the user's data folder
(`XDG_DATA_HOME`). Each install is a folder in its environment's; `environment.json` beside it names the one that
counts, and is replaced last. So what was installed stays what it is until another install is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from trinity_es.events.errors import ConfigError

__all__ = ["PROGRAM", "Installed", "environments_folder", "find", "install", "installed", "plain_name", "remove", "uv"]

FOLDER_VARIABLE = "TRINITY_ES_ENVIRONMENTS"
VERIFIERS_PACKAGE = "verifiers"
VERIFIERS = f"{VERIFIERS_PACKAGE}>=0.4,<0.5"
"""What is installed beside each environment, and plays it."""
PROGRAM = Path(__file__).with_name("verifiers_main.py")
"""What runs in an environment's own Python."""
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment, ready to be played."""

    name: str
    distribution: str
    """The package that it is, by its plain name."""
    packages: list[str]
    """What it was installed from, as uv is told."""
    versions: dict[str, str]
    """Of the environment and of verifiers."""
    folder: Path
    """Of this install: another one has another."""

    @property
    def taskset(self) -> str:
        """Name by which verifiers loads its taskset: its package's, whatever it is called here; of verifiers' own
        tasksets the one that it is called by.
        """
        return self.name if self.distribution == VERIFIERS_PACKAGE else self.distribution

    @property
    def version(self) -> str:
        return next(iter(self.versions.values()), "")

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


def environments_folder() -> Path:
    chosen = os.environ.get(FOLDER_VARIABLE)
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (Path(chosen) if chosen else Path(data) / "trinity_es" / "environments").expanduser().absolute()


def uv() -> str | None:
    """Return the program uv, of this Python or on PATH; None where there is none."""
    return shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def installed() -> list[Installed]:
    read = ((file, json.loads(file.read_text())) for file in sorted(environments_folder().glob("*/environment.json")))
    return [Installed(**{**told, "folder": file.parent / told["folder"]}) for file, told in read]


def find(name: str) -> Installed:
    """Return the environment of this name. Raises ConfigError where it is not installed."""
    wanted = plain_name(name)
    found = next((e for e in installed() if e.name == wanted), None)
    if found is None:
        raise ConfigError(f"{_missing(name)}: `trinity-es env install {name}`", environment=name)
    return found


def _missing(name: str) -> str:
    there = ", ".join(e.name for e in installed()) or "none"
    return f"environment {name!r} is not installed in {environments_folder()} (there: {there})"


def install(
    package: str, *, name: str | None = None, beside: Sequence[str] = (), index: str | None = None,
    python: str | None = None, say: Callable[[str], None] = lambda line: None,
) -> Installed:
    """Install an environment, anew where it was there, in a venv of its own.

    `package` is a name (`name@version` for one version), a folder or a wheel; `name` what it is called here, the name
    of its package by default; `beside` further packages; `index` where else to look for packages; `python` the Python
    to use, by default this one. Raises ConfigError with what uv said.
    """
    wanted, distribution = _requirement(package)
    if uv() is None:
        raise ConfigError("uv, which installs environments, is not here: pip install 'trinity-es[environments]'")
    called = _name(name or distribution)
    home = environments_folder() / called
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        before = {one.folder for one in installed() if one.name == called}
        folder = home / f"install-{uuid4().hex[:12]}"
        folder.mkdir()
        try:
            versions = _filled(folder / "venv", [wanted, VERIFIERS, *beside], _distribution(package), index,
                               python or sys.executable, say)
            made = Installed(name=called, distribution=distribution, packages=[wanted, VERIFIERS, *beside],
                             versions=versions, folder=folder)
            _require_loads(made, say)
            (folder / "environment.json").write_text(
                json.dumps({**asdict(made), "folder": folder.name}, indent=2) + "\n")
            os.replace(folder / "environment.json", home / "environment.json")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for left in set(home.glob("install-*")) - {folder, *before}:  # the last one may be in use
            shutil.rmtree(left, ignore_errors=True)
    return made


def remove(name: str) -> Installed:
    """Delete an environment and what was kept of it; return what it was. Raises ConfigError where there is none."""
    found = next((e for e in installed() if e.name == plain_name(name)), None)
    if found is None:
        raise ConfigError(_missing(name), environment=name)
    with _alone(found.folder.parent):
        (found.folder.parent / "environment.json").unlink()
        shutil.rmtree(found.folder.parent)
    return found


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from installing into the same folder, on this machine or another that shares it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _filled(
    venv: Path, packages: Sequence[str], distribution: str, index: str | None, base: str, say: Callable[[str], None]
) -> dict[str, str]:
    tool, python = uv() or "", str(venv / "bin" / "python")
    more = ["--extra-index-url", index] if index else []
    _run([tool, "venv", "--quiet", "--python", base, str(venv)], say)
    _run([tool, "pip", "install", "--quiet", "--python", python, *more, *packages], say)
    found: dict[str, str] = json.loads(_run([python, "-I", "-c", _VERSIONS, distribution, VERIFIERS_PACKAGE], say))
    return found


def _require_loads(made: Installed, say: Callable[[str], None]) -> None:
    """Require that verifiers loads its taskset. Raises ConfigError."""
    try:
        _run([str(made.python), "-I", str(PROGRAM), "load", made.taskset], say)
    except ConfigError as e:
        why = f"verifiers can't load the taskset {made.taskset!r}: {e.message.rstrip().splitlines()[-1]}"
        if made.distribution != VERIFIERS_PACKAGE:
            raise ConfigError(f"{why} (a package MY-ENV has a module my_env with a Taskset of verifiers 0.4 in its "
                              "__all__)") from e
        say(f"{why} (a config that names another taskset may be played)")


def _requirement(package: str) -> tuple[str, str]:
    """Return what uv is to be told, and the package's plain name. Raises ConfigError."""
    found = _distribution(package) if package else ""
    if package and Path(package).exists():
        return str(Path(package).absolute()), plain_name(found)
    name, _, version = package.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?", name):
        raise ConfigError(f"{package!r} is no package, folder or wheel: give NAME, NAME@VERSION or a path")
    return (f"{name}=={version}" if version else name), plain_name(found)


def _distribution(package: str) -> str:
    """Return the name of a package: of a folder what its pyproject.toml says, of a wheel what its file is called."""
    path = Path(package)
    if path.is_dir():
        try:
            return str(tomllib.loads((path / "pyproject.toml").read_text())["project"]["name"])
        except (OSError, KeyError, tomllib.TOMLDecodeError) as e:
            raise ConfigError(f"{path} is no package: its pyproject.toml gives no project.name ({e!r})") from e
    return path.name.partition("-")[0] if path.is_file() else re.split(r"[@\[]", package)[0]


def _name(given: str) -> str:
    """Return the name of an environment, which is that of its folder. Raises ConfigError."""
    plain = plain_name(given)
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", plain):
        raise ConfigError(f"{given!r} is no name of an environment: give letters, digits and dashes (--name)")
    return plain


def plain_name(name: str) -> str:
    """Return a package's name as all spellings of it have in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: Sequence[str], say: Callable[[str], None]) -> str:
    """Return what a command prints. Raises ConfigError where it fails."""
    say(" ".join(command))
    # By pip's own variables uv finds the index that pip would use.
    pips = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}
    given = {mine: os.environ[its] for mine, its in pips.items() if its in os.environ}
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**given, **variables})
    if done.returncode:
        raise ConfigError(f"{' '.join(command[:3])} ... failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
