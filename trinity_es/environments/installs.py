"""Installed environments, each in its own virtualenv, because its pinned packages may conflict with trinity_es's.

They are folders below `TRINITY_ES_ENVIRONMENTS`, by default `trinity_es/environments` in the user's data folder
(`XDG_DATA_HOME`). Each install gets a new subfolder. `environment.json` names the current subfolder and is replaced
last, so a failed install leaves the previous one in place.
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
"""Requirement that is installed beside each environment, since verifiers plays it."""
PROGRAM = Path(__file__).with_name("verifiers_main.py")
"""Script that an environment's own Python runs."""
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Environment package that is installed on this machine."""

    name: str
    distribution: str
    """Normalized name of its package."""
    packages: list[str]
    """Requirements passed to uv."""
    versions: dict[str, str]
    """Versions of the environment and of verifiers, by package."""
    folder: Path
    """Folder of this install; each install has its own."""

    @property
    def taskset(self) -> str:
        """Name by which verifiers loads the taskset: the package's name, or `name` for verifiers' own tasksets."""
        return self.name if self.distribution == VERIFIERS_PACKAGE else self.distribution

    @property
    def version(self) -> str:
        return next(iter(self.versions.values()), "")

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


def environments_folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        data_folder = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        folder = f"{data_folder}/trinity_es/environments"
    return Path(folder).expanduser().absolute()


def uv() -> str | None:
    """Return the path of the program uv, beside this Python or on PATH; None if it is not installed."""
    return shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def installed() -> list[Installed]:
    environments = []
    for file in sorted(environments_folder().glob("*/environment.json")):
        fields = json.loads(file.read_text())
        environments.append(Installed(**{**fields, "folder": file.parent / fields["folder"]}))
    return environments


def find(name: str) -> Installed:
    """Return the environment of this name. Raises ConfigError if it is not installed."""
    return _find(name, f". Install it with `trinity-es env install {name}`")


def _find(name: str, advice: str) -> Installed:
    environments = {environment.name: environment for environment in installed()}
    if plain_name(name) not in environments:
        raise ConfigError(f"environment {name!r} is not installed in {environments_folder()} (there: "
                          f"{', '.join(environments) or 'none'}){advice}", environment=name)
    return environments[plain_name(name)]


def install(
    package: str, *, name: str | None = None, beside: Sequence[str] = (), index: str | None = None,
    python: str | None = None, say: Callable[[str], None] = lambda line: None,
) -> Installed:
    """Install an environment in its own virtualenv, replacing an earlier install of the same name.

    `package` is a name (`name@version` for one version), a folder or a wheel. `name` is the environment's name, by
    default the package's. `beside` lists further packages, `index` is an extra package index, `python` the Python to
    use, by default this one. `say` is called with each command. Raises ConfigError with uv's error output.
    """
    requirement, distribution = _requirement(package)
    if uv() is None:
        raise ConfigError("uv, which installs environments, is not installed: pip install 'trinity-es[environments]'")
    environment = plain_name(name or distribution)
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", environment):
        raise ConfigError(f"{name or distribution!r} can't be an environment's name: give letters, digits and dashes "
                          "with --name")
    home = environments_folder() / environment
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home):
        previous_folders = {one.folder for one in installed() if one.name == environment}
        folder = home / f"install-{uuid4().hex[:12]}"
        folder.mkdir()
        try:
            packages = [requirement, VERIFIERS, *beside]
            versions = _make_venv(folder / "venv", packages, _distribution(package), index, python or sys.executable,
                                  say)
            result = Installed(name=environment, distribution=distribution, packages=packages, versions=versions,
                               folder=folder)
            _require_loads(result, say)
            (folder / "environment.json").write_text(
                json.dumps({**asdict(result), "folder": folder.name}, indent=2) + "\n")
            os.replace(folder / "environment.json", home / "environment.json")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # The previous install may be in use; those before it go.
        for old_folder in set(home.glob("install-*")) - {folder, *previous_folders}:
            shutil.rmtree(old_folder, ignore_errors=True)
    return result


def remove(name: str) -> Installed:
    """Delete an environment with all its installs, and return it. Raises ConfigError if it is not installed."""
    environment = _find(name, "")
    with _locked(environment.folder.parent):
        (environment.folder.parent / "environment.json").unlink()
        shutil.rmtree(environment.folder.parent)
    return environment


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_venv(
    venv: Path, packages: Sequence[str], distribution: str, index: str | None, base: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Make a virtualenv of the Python `base` with these packages; return `distribution`'s and verifiers' versions."""
    uv_path, python = uv() or "", str(venv / "bin" / "python")
    index_options = ["--extra-index-url", index] if index else []
    _run([uv_path, "venv", "--quiet", "--python", base, str(venv)], say)
    _run([uv_path, "pip", "install", "--quiet", "--python", python, *index_options, *packages], say)
    versions: dict[str, str] = json.loads(_run([python, "-I", "-c", _VERSIONS, distribution, VERIFIERS_PACKAGE], say))
    return versions


def _require_loads(environment: Installed, say: Callable[[str], None]) -> None:
    """Raise ConfigError if verifiers can't load the environment's taskset. For its own tasksets only `say` so."""
    try:
        _run([str(environment.python), "-I", str(PROGRAM), "load", environment.taskset], say)
    except ConfigError as e:
        problem = f"verifiers can't load the taskset {environment.taskset!r}: {e.message.rstrip().splitlines()[-1]}"
        if environment.distribution != VERIFIERS_PACKAGE:
            raise ConfigError(f"{problem}. A package MY-ENV needs a module my_env whose __all__ names a Taskset of "
                              "verifiers 0.4") from e
        say(f"{problem} (a config that names another taskset may be played)")


def _requirement(package: str) -> tuple[str, str]:
    """Return the requirement for uv, and the package's normalized name. Raises ConfigError."""
    distribution = plain_name(_distribution(package)) if package else ""
    if package and Path(package).exists():
        return str(Path(package).absolute()), distribution
    name, _, version = package.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?", name):
        raise ConfigError(f"{package!r} is not a package, folder or wheel: give NAME, NAME@VERSION or a path")
    return (f"{name}=={version}" if version else name), distribution


def _distribution(package: str) -> str:
    """Return a package's name, from a folder's pyproject.toml, a wheel's file name, or NAME@VERSION."""
    path = Path(package)
    if path.is_dir():
        try:
            return str(tomllib.loads((path / "pyproject.toml").read_text())["project"]["name"])
        except (OSError, KeyError, tomllib.TOMLDecodeError) as e:
            raise ConfigError(f"{path} is not a package: its pyproject.toml gives no project.name ({e!r})") from e
    return path.name.partition("-")[0] if path.is_file() else re.split(r"[@\[]", package)[0]


def plain_name(name: str) -> str:
    """Return a package's name normalized: lower case, with dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: Sequence[str], say: Callable[[str], None]) -> str:
    say(" ".join(command))
    # uv does not read pip's variables.
    pip_names = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}
    index = {uv_name: os.environ[pip_name] for uv_name, pip_name in pip_names.items() if pip_name in os.environ}
    own_names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in own_names}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**index, **variables})
    if result.returncode:
        error = result.stderr.strip()[-2000:]
        raise ConfigError(f"{' '.join(command[:3])} ... failed with status {result.returncode}: {error}")
    return result.stdout
