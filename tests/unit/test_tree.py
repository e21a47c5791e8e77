"""The shape of the tree: where things stand, which way imports point, and what no file may hold."""

import ast
import fnmatch
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set as AbstractSet
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "connector", "service")

TOP_LEVEL = {
    *("pyproject.toml", "service", "connector", "schemas", "deploy", "tests", "Dockerfile"),
    *(
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "Makefile",
        "requirements",
        "examples",
        "benchmarks",
        "docs",
        "LICENSE",
    ),
}

MAX_LINES = 400
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py", "manager.py"}

MAY_IMPORT = {
    "schemas": {"schemas"},
    "connector": {"schemas", "connector"},
    "service": {"schemas", "service"},
}
TORCH_FREE = (
    *("connector.plugin", "connector.plugin.carried", "connector.wire", "connector.vector_math"),
    "connector.versions",
)
"""What the service may take from the connector; their freedom from torch is tested below."""
HEAVY = ("torch", "vllm", "transformers")

MAY_USE_SQL = ("service/store/", "service/migrations/")
BROAD_EXCEPTS = {
    "connector/writers.py": 1,
    "service/control/scheduling.py": 1,
    "service/model_tokenizer.py": 1,
    "service/reader/row.py": 1,
    "service/work/keeper.py": 1,
    "service/store/tasks.py": 1,
    "service/trainers/ahead.py": 1,
    "service/work/runner.py": 1,
}
"""The supervisors: each turns whatever escapes into the named failure of a unit or a job; the thread of a
loader, whose trainer raises it; a row that a loader's worker sends, which raises it when it is read; and what
libraries raise over a model's tokenizer."""

INDEX_HELP = "download.pytorch.org/whl/cpu"
PLACES = re.compile(
    r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org\S*|[/]simple/|(?<![\w.}$])/(?:root|work|opt/[\w-]*)/"
)
"""Registry hosts, and paths of one machine."""


FROZEN = ROOT / "tests" / "frozen"
"""What earlier code wrote lies there as it was written."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def texts() -> Iterator[tuple[str, str]]:
    """Yield the path and text of every file to be tracked, but for pictures and what is frozen."""
    for entry in sorted(ROOT.iterdir()):
        if entry.name != ".git" and not is_ignored(entry):
            for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
                if path.is_file() and not any(is_ignored(part) for part in (path, *path.parents)):
                    if path.suffix == ".png" or (path.is_relative_to(FROZEN) and path.suffix != ".py"):
                        continue
                    yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def is_ignored(path: Path) -> bool:
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of the modules that a source imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module in PACKAGES:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(package: str, tree: ast.AST) -> list[str]:
    """Return what a module of `package` imports of ours against the direction of the data."""
    ours = [name for name in imported(tree) if name.split(".")[0] in PACKAGES]
    wrong = [name for name in ours if name.split(".")[0] not in MAY_IMPORT[package]]
    return [name for name in wrong if not (package == "service" and name in TORCH_FREE)]


def broad_excepts(tree: ast.AST) -> int:
    """Count the handlers of `Exception`, `BaseException` without a re-raise, and bare ones."""
    return sum(is_broad(node) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))


def is_broad(handler: ast.ExceptHandler) -> bool:
    named = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    )
    if handler.type is None or "Exception" in named:
        return True
    last = handler.body[-1]
    return "BaseException" in named and not (isinstance(last, ast.Raise) and last.exc is None)


def unbounded_queues(tree: ast.AST) -> int:
    """Count the queues that are made without a size."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"}
        and not (node.args or node.keywords)
        for node in ast.walk(tree)
    )


def places_named(path: str, text: str) -> list[str]:
    """Return the registry hosts and machine paths in a text; install help may name torch's CPU index."""
    allowed = INDEX_HELP if path in {"README.md", "Makefile", "tests/unit/test_tree.py"} else ""
    return [found for found in PLACES.findall(text) if not allowed or not found.startswith(allowed)]


def modules_loaded_by(*names: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after importing `names`."""
    code = f"import sys, {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    found = {
        entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".") and not is_ignored(entry)
    }
    assert found <= TOP_LEVEL
    assert {"pyproject.toml", "service", "connector", "schemas", "deploy", "tests", "Dockerfile"} <= found


def test_no_file_is_too_long_to_hold_in_the_head() -> None:
    every = sources(*PACKAGES, "tests", "examples", "benchmarks", "requirements")
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in every}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


IMPORTED_AS = {"yaml": "pyyaml", "pydantic_core": "pydantic"}


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in lines}
    used = {
        name.split(".")[0]
        for path in sources(*PACKAGES)
        for name in imported(ast.parse(path.read_text()))
        if name and name.split(".")[0] not in {*sys.stdlib_module_names, *PACKAGES}
    }
    assert {IMPORTED_AS.get(name, name).replace("_", "-") for name in used} - declared == set()


def test_every_file_is_named_for_its_job() -> None:
    every = sources(*PACKAGES, "tests", "examples", "benchmarks")
    assert [path for path in every if path.name in VAGUE_NAMES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_data(package: str) -> None:
    wrong = {
        path.relative_to(ROOT).as_posix(): found
        for path in sources(package)
        if (found := wrong_imports(package, ast.parse(path.read_text())))
    }
    assert wrong == {}


STEPS = (
    "store",
    "work",
    "artifacts",
    "plan",
    "proof",
    "capture",
    "publish",
    "client",
    "reader",
    "export",
    "diagnose",
    "trainers",
    "control",
    "doctor",
    "api",
    "page",
    "worker",
    "ray_pool",
    "cli",
)
"""The service's parts in the order that data takes; a part imports only what stands before it."""


PUTS_TOGETHER = {"service/api/app.py": "page"}
"""The application is made of both fronts: its routes and the page, which is made of what the routes are."""


def test_the_services_parts_import_only_what_comes_before_them_in_the_datas_path() -> None:
    backwards = []
    for path in sources("service"):
        part = path.relative_to(ROOT / "service").with_suffix("").parts[0]
        if part not in STEPS:
            continue
        for name in imported(ast.parse(path.read_text())):
            of = name.split(".")[1] if name.startswith("service.") else ""
            file = path.relative_to(ROOT).as_posix()
            if of in STEPS and STEPS.index(of) > STEPS.index(part) and PUTS_TOGETHER.get(file) != of:
                backwards.append(f"{file}: {name}")
    assert backwards == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not inside a function, nor for types alone: a circle has no first module to read."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(*PACKAGES)}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    graph = {name: neighbours(ast.parse(path.read_text()), modules.keys()) for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()


def neighbours(tree: ast.AST, modules: AbstractSet[str]) -> set[str]:
    """Return those of `modules` that a source imports; a package counts if none of its modules is named."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in modules else node.module for name in inner]
    return modules & set(names)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("schemas", "from service.settings import Settings"),
        ("schemas", "import connector.wire"),
        ("connector", "from service import errors"),
        ("service", "from connector import pool"),
        ("service", "def late():\n    from connector.worker import Worker"),
    ],
)
def test_an_import_against_the_data_is_found(package: str, line: str) -> None:
    assert wrong_imports(package, ast.parse(line)) != []


def test_the_front_end_starts_without_the_engine() -> None:
    assert modules_loaded_by("service.api.app", "service.cli").isdisjoint(HEAVY)


def test_what_the_service_takes_from_the_connector_is_free_of_torch() -> None:
    assert modules_loaded_by(*TORCH_FREE).isdisjoint(HEAVY)


def test_of_the_datasets_format_only_what_makes_tensors_imports_torch() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("schemas/dataset")}
    tensors = {f"schemas.dataset.{name}" for name in ("codecs.fp8", "norm", "states")}
    assert tensors <= names
    assert modules_loaded_by(*(names - tensors)).isdisjoint(HEAVY)


def test_a_loaded_module_is_seen() -> None:
    assert "torch" in modules_loaded_by("torch")


def test_all_sql_stands_in_the_store() -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        if any(
            name.split(".")[0] in {"sqlalchemy", "alembic"} for name in imported(ast.parse(path.read_text()))
        )
    ]
    assert users
    assert [path for path in users if not path.startswith(MAY_USE_SQL)] == []


def test_only_the_supervisors_catch_everything() -> None:
    counts = {
        path.relative_to(ROOT).as_posix(): broad_excepts(ast.parse(path.read_text()))
        for path in sources(*PACKAGES)
    }
    assert {path: count for path, count in counts.items() if count} == BROAD_EXCEPTS


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except Exception: pass", 1),
        ("except (OSError, Exception): pass", 1),
        ("except: pass", 1),
        ("except BaseException: pass", 1),
        ("except BaseException:\n    undo()\n    raise", 0),
        ("except OSError: pass", 0),
    ],
)
def test_a_broad_handler_is_counted(handler: str, count: int) -> None:
    assert broad_excepts(ast.parse(f"try:\n    act()\n{handler}")) == count


def test_every_queue_has_a_size() -> None:
    unbounded = [path for path in sources(*PACKAGES) if unbounded_queues(ast.parse(path.read_text()))]
    assert unbounded == []


@pytest.mark.parametrize(("made", "count"), [("queue.Queue()", 1), ("asyncio.Queue()", 1), ("Queue(8)", 0)])
def test_a_queue_without_a_size_is_counted(made: str, count: int) -> None:
    assert unbounded_queues(ast.parse(made)) == count


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    assert {path: found for path, text in texts() if (found := places_named(path, text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "https://pypi." + "org",
        "index " + INDEX_HELP,
        " /wor" + "k/main",
        "='/ro" + "ot/x'",
        " /opt" + "/wheels/",
    ],
)
def test_a_registry_or_a_path_is_found(text: str) -> None:
    assert places_named("service/api/app.py", text) != []


def test_every_text_is_ascii() -> None:
    assert [path for path, text in texts() if not text.isascii()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_has_a_package_of_this_name(package: str) -> None:
    owners = importlib.metadata.packages_distributions()
    assert "pytest" in owners
    assert set(owners.get(package, [])) <= {"eagle-quarry"}
