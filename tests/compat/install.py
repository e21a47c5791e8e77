"""Build the wheel, and install it where its users are: alone, beside a trainer, with what serves.

`python -m tests.compat.install`: needs an index. Resolves for each Python that is found (3.11 to 3.13), then
installs the light package beside speculators for the running one and reads, verifies and exports a dataset
there; at last installs what serves in an environment of its own and runs deploy/README.md's smoke job on the
CPU, with a model made here. Exit status 1 if anything of that fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.fake_hub import FakeHub
from tests.support.tiny_model import random_target

ROOT = Path(__file__).resolve().parents[2]
DATASET, TARGET = ROOT / "tests/frozen/datasets/plain", ROOT / "tests/frozen/target"
SPECULATORS, SPECFORGE = "speculators==0.9.0", "specforge==0.2.0"
SMOKE_MODEL = "Qwen/Qwen3-0.6B"
INSTALLS = {
    "light": ("", (), ("3.11", "3.12", "3.13")),
    f"light, beside {SPECULATORS}": ("", (SPECULATORS,), ("3.11", "3.12", "3.13")),
    f"light, beside {SPECFORGE}": ("", (SPECFORGE,), ("3.12",)),
    "service": ("[service]", (), ("3.11", "3.12")),
    "vllm": ("[vllm]", (), ("3.12",)),
}
"""By name: the extra, what else is asked for in the same command, and for which Pythons."""
READ = """
from service.reader import Eagle3, QuarryDataset
rows = QuarryDataset({dataset!r}, view=Eagle3())
print(len(rows), "rows,", tuple(rows[0]["hidden_states"].shape), "of the first")
"""
OLDER_HUB = """
from service.artifacts.dataset_files import HubFiles
from service.errors import OptionRefused
assert HubFiles("org/set", endpoint={url!r}).manifests() == []
try:
    HubFiles("org/none", endpoint={url!r})
except OptionRefused:
    print("the Hub's client of before 2, which SpecForge takes, says what is not there")
else:
    raise AssertionError
"""


def ran(*command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return what a command printed. Raises CalledProcessError, after its errors were printed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def built(folder: Path) -> Path:
    """Build the wheel, and look at what is in it."""
    ran(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.split("/")[0] for name in packed.namelist() if ".dist-info" not in name}
    assert tops == {"service", "connector", "schemas"}, tops
    return wheel


def python(version: str) -> str | None:
    """Return an interpreter of that version, if the machine has one."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    found = shutil.which(f"python{version}")
    runs = found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
    return found if runs else None


def resolved(interpreter: str, requirements: Sequence[str], folder: Path) -> int:
    """Return how many packages an install would bring. Raises CalledProcessError."""
    venv, report = folder / f"venv-{Path(interpreter).name}", folder / "report.json"
    if not venv.exists():
        ran(interpreter, "-m", "venv", venv)
    pip = (venv / "bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")
    ran(*pip, "--report", report, *requirements)
    return len(json.loads(report.read_text())["install"])


def used(wheel: Path, folder: Path) -> None:
    """Install the light package beside speculators, then read, verify and export a dataset there."""
    venv = folder / "used"
    ran(sys.executable, "-m", "venv", venv)
    constraint = ROOT / "requirements/torch.txt"
    pip = (venv / "bin/python", "-m", "pip")
    ran(*pip, "install", "--quiet", "--constraint", constraint, wheel)
    size = sum(path.stat().st_size for path in venv.rglob("*") if path.is_file())
    torch = sum(path.stat().st_size for path in venv.rglob("site-packages/torch/**/*") if path.is_file())
    num = len(json.loads(ran(*pip, "list", "--format", "json")))
    print(f"  {num} packages, {(size - torch) / 1e6:.0f} MB and torch")
    ran(*pip, "install", "--quiet", "--constraint", constraint, SPECULATORS, "twine")
    ran(venv / "bin/twine", "check", "--strict", wheel)
    quarry = venv / "bin/quarry"
    print(" ", ran(venv / "bin/python", "-c", READ.format(dataset=str(DATASET)), cwd=folder).strip())
    ran(quarry, "verify", DATASET, cwd=folder)
    ran(quarry, "export", DATASET, "--to", "speculators", "--out", "out", "--target", TARGET, cwd=folder)
    print("  read, verified, exported")
    ran(*pip, "install", "--quiet", "huggingface_hub<2")
    with FakeHub() as hub:
        hub.add_repo("org/set")
        print(" ", ran(venv / "bin/python", "-c", OLDER_HUB.format(url=hub.url), cwd=folder).strip())


def smoked(wheel: Path, folder: Path) -> None:
    """Install what serves, with the CPU's engine, and run the commands of the smoke job."""
    venv, target = folder / "smoked", folder / "target"
    ran(sys.executable, "-m", "venv", venv)
    pip = (venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps")
    ran(*pip, "--requirement", ROOT / "requirements/torch.txt")
    ran(*pip, "--require-hashes", "--requirement", ROOT / "requirements/cpu.txt")
    ran(*pip, wheel)
    random_target(target)
    section = (ROOT / "deploy/README.md").read_text().split("## A smoke job\n")[1]
    commands = section.split("```bash\n")[1].split("```")[0]
    assert SMOKE_MODEL in commands
    own = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran(
        *("bash", "-e", "-c", commands.replace(SMOKE_MODEL, str(target))),
        cwd=folder,
        env=os.environ | own,
    )
    print("  the smoke job ran")


def main() -> int:
    """Print a line an install; return the exit status."""
    status = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        for what, (extra, beside, versions) in INSTALLS.items():
            for version in versions:
                interpreter = python(version)
                if interpreter is None:
                    print(f"{what}, Python {version}: no interpreter is here")
                    continue
                try:
                    num = resolved(interpreter, [f"{wheel}{extra}", *beside], folder)
                    print(f"{what}, Python {version}: {num} packages")
                except subprocess.CalledProcessError:
                    print(f"{what}, Python {version}: cannot be resolved")
                    status = 1
        print(f"installed, Python {sys.version_info[0]}.{sys.version_info[1]}:")
        used(wheel, folder)
        smoked(wheel, folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
