"""The house rules: who imports whom, what a bare import needs, how long a file is, what no file may name."""

from __future__ import annotations

import ast
import gc
import importlib
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

ROOMS = ["events", "projections", "actors", "trinity_es"]
"""From the bottom up: a room imports itself and what stands before it.

The rooms stand at the top of the repository, and are imported as `trinity_es.events` and so on: links in `trinity_es/`
lead to them.
"""
HEAVY = {"torch", "vllm", "transformers"}
MAY_BE_HEAVY = {
    "actors/engines/vllm/engine.py", "actors/engines/vllm/gloo_weight_transfer.py", "trinity_es/integrations/trl.py",
    "trinity_es/integrations/trl_async.py",
}
LINES = 450
WALLS: dict[str, tuple[str, str | None]] = {
    "events": ("events/vocabulary", "events.store.log"),
    "events/vocabulary": ("events", "events.store.log"),
    "events/store/database": ("events events/vocabulary", "events.store.records.log_values"),
    "events/store/records": ("events events/vocabulary events/store/database", "events.store.checks.verify"),
    "events/store/payloads": ("events events/vocabulary events/store/database", "events.store.checks.verify"),
    "events/store/checks": (
        "events events/vocabulary events/store/database events/store/records", "events.store.log",
    ),
    "events/store": ("events events/vocabulary events/store/*", None),
    "projections": ("", "projections.tables.read_models"),
    "projections/tables": ("projections", "projections.why.explain"),
    "projections/history": ("projections", "projections.tables.read_models"),
    "projections/why": ("projections", "projections.reading.log_reader"),
    "projections/verify": ("projections projections/tables", "projections.reading.log_reader"),
    "projections/reading": (
        "projections projections/tables projections/history projections/why projections/verify", None,
    ),
    "actors": ("actors/commands actors/config", "actors.coordinator.live_state"),
    "actors/commands": ("actors", "actors.coordinator.live_state"),
    "actors/config": ("actors actors/engines", "actors.coordinator.live_state"),
    "actors/coordinator": (
        "actors actors/commands actors/config actors/coordinator/*", "actors.rollout.workflow_runner",
    ),
    "actors/coordinator/decisions": ("actors actors/commands", "actors.coordinator.live_state"),
    "actors/hosts": ("actors actors/config actors/engines", "actors.coordinator.live_state"),
    "actors/coordinator/fleet": (
        "actors actors/commands actors/config actors/coordinator actors/coordinator/decisions actors/hosts",
        "actors.coordinator.handlers.batches",
    ),
    "actors/coordinator/delivery": (
        "actors actors/commands actors/coordinator", "actors.coordinator.fleet.runner_reports",
    ),
    "actors/coordinator/handlers": (
        "actors actors/commands actors/config actors/coordinator actors/coordinator/*", "actors.engines.interface",
    ),
    "actors/engines": ("actors", "actors.rollout.model"),
    "actors/engines/vllm": ("actors actors/engines", "actors.engines.http.engine"),
    "actors/engines/http": ("actors actors/config actors/engines actors/engines/vllm", "actors.rollout.model"),
    "actors/rollout/conversation": ("actors actors/engines", "actors.rollout.model"),
    "actors/rollout/workers": (
        "actors actors/engines actors/engines/* actors/rollout actors/rollout/conversation",
        "actors.serving.engine_server",
    ),
    "actors/rollout": ("actors actors/engines actors/engines/* actors/rollout/*", "actors.serving.engine_server"),
    "actors/serving": (
        "actors actors/engines actors/engines/* actors/rollout actors/rollout/*", "actors.runner.actor",
    ),
    "actors/runner": (
        "actors actors/config actors/engines actors/engines/* actors/rollout actors/rollout/* actors/serving",
        "actors.coordinator.decisions.batch_decisions",
    ),
    "actors/guardian": ("actors actors/engines actors/coordinator actors/hosts actors/runner", "actors.rollout.model"),
    "trinity_es": ("", "config.config"),
    "trinity_es/workflows": ("trinity_es", "config.config"),
    "trinity_es/environments": ("trinity_es trinity_es/workflows", "config.config"),
    "trinity_es/config": ("trinity_es trinity_es/workflows trinity_es/environments", "tasksets.taskset"),
    "trinity_es/tasksets": (
        "trinity_es trinity_es/config trinity_es/environments trinity_es/workflows", "system.running_system",
    ),
    "trinity_es/system": ("trinity_es trinity_es/config", "client.teardown"),
    "trinity_es/weights": ("trinity_es trinity_es/config", "client.connection"),
    "trinity_es/telemetry": ("trinity_es trinity_es/config", "client.rollout_client"),
    "trinity_es/audit": ("trinity_es trinity_es/config", "client.rollout_client"),
    "trinity_es/audit/whatif": ("trinity_es trinity_es/config trinity_es/audit", "run.sync_policy"),
    "trinity_es/client": (
        "trinity_es trinity_es/config trinity_es/workflows trinity_es/system trinity_es/weights", "run.explorer",
    ),
    "trinity_es/hosts": ("trinity_es trinity_es/config trinity_es/system trinity_es/client", "run.explorer"),
    "trinity_es/serve": ("trinity_es trinity_es/config trinity_es/system trinity_es/client", "run.explorer"),
    "trinity_es/integrations": (
        "trinity_es trinity_es/config trinity_es/workflows trinity_es/system trinity_es/weights trinity_es/client",
        "run.explorer",
    ),
    "trinity_es/run": (
        "trinity_es trinity_es/config trinity_es/workflows trinity_es/tasksets trinity_es/system trinity_es/weights "
        "trinity_es/telemetry trinity_es/client trinity_es/serve", "audit.export",
    ),
    "trinity_es/dashboard": ("trinity_es trinity_es/audit trinity_es/telemetry", "cli.render.batch_tables"),
    "trinity_es/dashboard/pages": ("trinity_es trinity_es/audit trinity_es/dashboard", "cli.render.batch_tables"),
    "trinity_es/cli": ("trinity_es trinity_es/* trinity_es/cli/*", None),
    "trinity_es/cli/commands": ("trinity_es trinity_es/* trinity_es/audit/whatif trinity_es/cli/render", None),
    "trinity_es/cli/render": ("trinity_es", "cli.common"),
}
"""What the files of a folder may import of their own room, besides their own folder; and an import that it stops, None
where a room has nothing above the folder. Coordinator and runner share only the ground, which is what stands in
`actors/` itself."""
DOORS = {
    ("actors/launch.py", "actors/guardian"),  # it starts everything
    ("trinity_es/__main__.py", "trinity_es/cli"),  # it is the command
    ("trinity_es/testing.py", "trinity_es/workflows"),  # users' tests find both there
    ("trinity_es/dashboard/app.py", "trinity_es/dashboard/pages"),  # it puts the pages together
}
"""Imports that a wall lets through."""


def _modules(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms or ROOMS for path in (ROOT / room).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    """The name by which a file of a room is imported."""
    name = _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.partition(".")[0] == ROOMS[-1] else f"{ROOMS[-1]}.{name}"


def _room(module: str) -> str:
    """The room of a module, or whatever else it is of."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == ROOMS[-1] and rest.partition(".")[0] in ROOMS else first


def _files() -> list[Path]:
    """What is in the repository, or would be: tracked files, and untracked ones that git does not ignore."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@cache
def _parse(path: Path) -> ast.Module:
    # Python 3.11's parser counts its depth in one place for everybody: when a garbage collection in the middle of it
    # lets another thread parse, it fails with "AST constructor recursion depth mismatch" (seen; gh-106905).
    gc.disable()
    try:
        return ast.parse(path.read_text(), filename=str(path))
    finally:
        gc.enable()


@cache
def _is_module(name: str) -> bool:
    room = _room(name)
    path = ROOT.joinpath(*name.split(".")[0 if room == ROOMS[-1] else 1:])
    return room in ROOMS and (path.is_dir() or path.with_suffix(".py").is_file())


@cache
def _imports(path: Path, *, top_level: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, module) of each import in a file: see `_found`."""
    return tuple(_found(path, _parse(path), top_level=top_level))


def _found(path: Path, tree: ast.Module, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of each import statement, and of import_module of a literal; relative ones are resolved.

    With `top_level` only those that run when the module is imported, and not those for the type checker alone.
    """
    package = (*_module(path).split("."), *(("__init__",) if path.name == "__init__.py" else ()))
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:  # which may be a module
                yield node.lineno, f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module
        elif (
            isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
        ):
            yield node.lineno, str(node.args[0].value)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not (top_level and inside_function):
            todo += ast.iter_child_nodes(node)


def _importing(paths: Iterable[Path], is_wrong: Callable[[str], object], *, top_level: bool = False) -> list[str]:
    return [
        f"{_name(path)}:{line} imports {module}"
        for path in paths for line, module in _imports(path, top_level=top_level) if is_wrong(module)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_never_imports_a_higher_one(room: str) -> None:
    higher = set(ROOMS[ROOMS.index(room) + 1:]) | {"tests", "examples", "benchmarks"}
    assert _importing(_modules(room), lambda module: _room(module) in higher) == []


def test_the_rooms_are_one_package() -> None:
    """What a user has beside his config may be called `events.py` or `actors/`: nobody imports a room by that name."""
    for room in ROOMS[:-1]:
        link = ROOT / ROOMS[-1] / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room
    python = [path for path in _files() if path.suffix == ".py"]
    assert _importing(python, lambda module: module.partition(".")[0] in ROOMS[:-1]) == []


def _folder(module: str) -> str:
    room = _room(module)
    parts = module.split(".")[0 if room == ROOMS[-1] else 1:]
    path = ROOT.joinpath(*parts)
    if room not in ROOMS:
        return ""
    return _name(path if path.is_dir() else path.parent)


def _through_walls(path: Path, imports: Iterable[tuple[int, str]]) -> list[str]:
    folder = _name(path.parent)
    if folder not in WALLS or _name(path) == "trinity_es/__init__.py":  # which has every name, when it is first used
        return []
    allowed = WALLS[folder][0].split()
    wrong = []
    for line, module in imports:
        of = _folder(module)
        if _room(module) != folder.partition("/")[0] or of == folder or (_name(path), of) in DOORS:
            continue
        if of not in allowed and f"{of.rpartition('/')[0]}/*" not in allowed:
            wrong.append(f"{_name(path)}:{line} imports {module}")
    return wrong


def test_no_import_goes_through_a_wall() -> None:
    assert [wrong for path in _modules() for wrong in _through_walls(path, _imports(path, top_level=False))] == []


def test_every_folder_has_a_wall() -> None:
    """One that is new says here what it may import."""
    folders = {_name(path.parent) for path in _modules()}
    assert folders == set(WALLS)


@pytest.mark.parametrize("folder", [folder for folder, (_, module) in WALLS.items() if module])
@pytest.mark.parametrize("form", ["import {0}", "from {1} import {2}", "def f():\n    from {0} import x"])
def test_a_wall_stops_what_it_forbids(folder: str, form: str) -> None:
    module = f"trinity_es.{WALLS[folder][1]}"
    path = ROOT / folder / "new.py"
    found = _found(path, ast.parse(form.format(module, *module.rsplit(".", 1))))
    assert [wrong.rpartition(" ")[2] for wrong in _through_walls(path, found)] == [module]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Neither at import, nor for the type checker, nor inside a function."""
    names = {_module(path): path for path in _modules()}
    edges = {
        name: {m for _, module in _imports(path) if (m := module) in names and m != name}
        for name, path in names.items()
    }
    left = dict(edges)
    while free := [name for name, to in left.items() if not to & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_torch_and_vllm_are_imported_by_the_vllm_engine_alone() -> None:
    light = [path for path in _modules() if _name(path) not in MAY_BE_HEAVY]
    assert _importing(light, lambda module: module.partition(".")[0] in HEAVY, top_level=True) == []


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked in this test")

sys.meta_path.insert(0, Blocked())
import importlib
for name in {names!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("what", ["events and projections", "trinity_es"])
def test_the_base_imports_without_torch_vllm_and_thespian(what: str) -> None:
    names = ["trinity_es"]
    if what != "trinity_es":
        names = [_module(p) for p in _modules("events", "projections")]
    code = BLOCKED.format(blocked={*HEAVY, "thespian"}, names=names)
    _run(code)


def test_the_keeper_lives_without_the_config_and_the_store() -> None:
    """They would take three quarters of its memory."""
    _run(BLOCKED.format(blocked={*HEAVY, "sqlalchemy", "pydantic", "numpy"}, names=["trinity_es.system.keeper"]))


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def _exported(path: Path) -> list[str] | None:
    for node in _parse(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def test_all_is_sorted_and_real() -> None:
    """Constants, then classes, then functions, as ruff sorts them, each once; and the module has each."""
    wrong = []
    for path in _modules():
        if (exported := _exported(path)) is None:
            continue
        sort = sorted(set(exported), key=lambda n: (not (n.isupper() and len(n) > 1), not n[0].isupper(), n))
        if exported != sort:
            wrong.append(f"{_name(path)}: {exported} should be {sort}")
        if _name(path) not in MAY_BE_HEAVY:
            module = importlib.import_module(_module(path))
            wrong += [f"{_name(path)}: there is no {name}" for name in exported if not hasattr(module, name)]
    assert wrong == []


def test_every_module_with_code_says_what_it_exports() -> None:
    silent = [
        _name(path) for path in _modules()
        if path.name != "__main__.py" and _exported(path) is None
        and any(not isinstance(node, ast.Expr) for node in _parse(path).body)  # it has code
    ]
    assert silent == []


@pytest.mark.filterwarnings("default")
def test_long_modules_are_listed_in_the_warnings() -> None:
    for path in _files():
        if path.suffix == ".py" and (n := len(path.read_text().splitlines())) > LINES:
            warnings.warn(f"{_name(path)} has {n} lines, over {LINES}: is it one room, or two?", stacklevel=1)


# Pieces are joined here, or this file would name them itself.
MACHINE_PATHS = re.compile("|".join([
    r"/(?:work|root|home/\w+)/[\w.]", "/opt/" + "(?:wheels|pypi)", "/tmp/" + "bash_jobs",
]))
REGISTRIES = re.compile("|".join([
    "pythonhosted" + r"\.", r"pypi\." + "org/simple", r"download\.py" + "torch", "artifact" + "ory",
    "code" + "artifact", r"index-url[ =]+\S+" + "://", r"find-links[ =]+(?:\S+" + "://|/)",
]), re.IGNORECASE)
INSTALLERS = re.compile(r"^(Makefile|pyproject\.toml|requirements/.*|\.ci/.*)$")


def _lines() -> Iterator[tuple[str, int, str]]:
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield from ((_name(path), i, line) for i, line in enumerate(text.splitlines(), 1))


def test_no_file_names_a_registry_host_or_a_path_of_some_machine() -> None:
    wrong = [
        f"{name}:{i}: {line.strip()[:100]}" for name, i, line in _lines()
        if MACHINE_PATHS.search(line) or REGISTRIES.search(line)
        or (INSTALLERS.match(name) and re.search(r"https?://\w", line))
    ]
    assert wrong == []


def test_no_lock_file_is_kept() -> None:
    assert [_name(p) for p in _files() if p.name in {"uv.lock", "poetry.lock", "Pipfile.lock"}] == []


def test_no_function_s_docstring_begins_with_a_relative_word() -> None:
    """A function's docstring says what it does, a property's what it is (ruff's D401 holds the rest)."""
    wrong = [
        f"{_name(path)}:{node.lineno}: {text[:60]}"
        for path in _modules() for node in ast.walk(_parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node))
        and re.match(r"(What|Whether|Where|Who|Which|How|Those|So|Of|As|These)\b", text)
    ]
    assert wrong == []


def test_no_test_imports_another_test_s_file() -> None:
    """What tests share is in tests/helpers."""
    tests = [path for path in _files() if path.suffix == ".py" and _name(path).startswith("tests/")]
    assert _importing(tests, lambda module: re.search(r"(^|\.)(test_\w+|conftest)(\.|$)", module)) == []
