"""What `pip install eagle-quarry` can do without its extra: read, verify, export, talk to a service.

What only the extras bring is hidden from a child; tests/compat installs the wheel for real.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from service.installed import extra_of

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "tests/frozen/datasets/plain"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
READ = """
from service.reader import QuarryDataset
rows = QuarryDataset({dataset!r})
assert rows.row(0).layer(rows.about.layer_ids[-1]).isfinite().all()
"""
COMMAND = """
from service.cli import main
main({arguments!r})
"""


def closure(requirements: list[str]) -> set[str]:
    """Return the names of all that these lines bring along, as installed here."""
    names, waiting = set(), [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in names or name == "eagle-quarry":
            continue
        names.add(name)
        try:
            found = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        wanted = {"", *one.extras}
        waiting += [
            r
            for r in found
            if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in wanted)
        ]
    return names


@pytest.fixture(scope="module")
def hidden() -> set[str]:
    """Return the modules that a light install does not have."""
    light = closure(PROJECT["dependencies"])
    extra = closure([line for lines in EXTRAS.values() for line in lines]) - light
    return {
        module
        for module, names in packages_distributions().items()
        if {canonicalize_name(name) for name in names} <= extra
    }


def run(hidden: set[str], code: str) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(WITHOUT.format(hidden=hidden))  # of its children, too
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"QUARRY_SERVER": "http://127.0.0.1:9", "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
        )


def command(hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(hidden, COMMAND.format(arguments=list(arguments)))


def test_what_serves_is_hidden(hidden: set[str]) -> None:
    assert {"fastapi", "uvicorn", "sqlalchemy", "psycopg", "alembic", "datasets", "transformers"} <= hidden
    assert hidden.isdisjoint({"torch", "numpy", "pyarrow", "pydantic", "huggingface_hub", "httpx2", "typer"})


@pytest.mark.slow
def test_a_dataset_is_read(hidden: set[str]) -> None:
    done = run(hidden, READ.format(dataset=str(DATASET)))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_dataset_is_verified(hidden: set[str]) -> None:
    done = command(hidden, "verify", str(DATASET))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_dataset_is_exported(hidden: set[str], tmp_path: Path) -> None:
    target = str(ROOT / "tests/frozen/target")
    done = command(
        hidden,
        "export",
        str(DATASET),
        "--to",
        "speculators",
        "--out",
        str(tmp_path / "out"),
        "--target",
        target,
    )
    assert done.returncode == 0, done.stderr


def test_the_client_talks_to_a_service(hidden: set[str]) -> None:
    done = command(hidden, "jobs", "list")
    assert (done.returncode, "does not answer" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("arguments", [["serve"], ["worker"], ["publish", str(DATASET), "a/b"]])
def test_a_command_whose_extra_is_missing_says_which(
    hidden: set[str], tmp_path: Path, arguments: list[str]
) -> None:
    done = command(hidden, *arguments)
    assert done.returncode == 2, done.stderr
    assert "pip install 'eagle-quarry[service]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_node_is_looked_at_as_far_as_it_goes(hidden: set[str], tmp_path: Path) -> None:
    done = command(hidden, "doctor", "--json", "--data-dir", str(tmp_path))
    assert done.stderr == ""
    found = {one["what"]: one for one in map(json.loads, done.stdout.splitlines())}
    for what, module in (("memory", "psutil"), ("database", "psycopg")):
        assert (found[what]["verdict"], found[what]["detail"]) == ("not seen", f"{module} is not installed")
        assert found[what]["cure"] == "pip install 'eagle-quarry[service]'"
    assert found["disk speed"]["verdict"] != "not seen"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        *(("fastapi.routing", "service"), ("sqlalchemy", "service"), ("prometheus_client", "service")),
        *(("vllm.outputs", "vllm"), ("ray", "ray"), ("torch", None), ("elsewhere", None)),
        ("hs_connectors", "speculators"),
    ],
)
def test_a_module_belongs_to_the_extra_that_brings_it(module: str, extra: str | None) -> None:
    lines = [
        *PROJECT["dependencies"],
        *(f'{line}; extra == "{name}"' for name, lines in EXTRAS.items() for line in lines),
        *(f"{line}; extra == 'ray'" for line in EXTRAS["service"]),  # as a wheel writes what it includes
    ]
    assert extra_of(module, lines) == extra
