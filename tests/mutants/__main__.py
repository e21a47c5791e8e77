"""Make a copy of the tree whose every site asks whether it is the mutant, and hunt there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.sites import instrumented, part_of

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".cache" / "mutants"


def copy_tree(tree: Path) -> None:
    """Make `tree` hold what git would, the product instrumented; what has not changed keeps its time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in sorted(names):
        data = (ROOT / name).read_bytes()
        if name.endswith(".py") and part_of(name):
            data = instrumented(name, data.decode())[0].encode()
        target = tree / name
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            shutil.copymode(ROOT / name, target)
    for path in sorted(tree.rglob("*.py")):
        if path.relative_to(tree).as_posix() not in names:
            path.unlink()


if __name__ == "__main__":
    copy_tree(WORK / "tree")
    os.chdir(WORK / "tree")
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # as in tests/conftest.py, which torch's import does not wait for here
    )
    os.environ["PYTHONPATH"] = str(WORK / "tree")
    os.execv(sys.executable, [sys.executable, "-m", "tests.mutants.hunt", str(ROOT), *sys.argv[1:]])
