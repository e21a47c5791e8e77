"""Builds the two transfers that make vLLM run on a bare GPU machine: `python -m benchmarks.gpu.carry`.

Such a machine has torch 2.11 for CUDA 13, Python 3.12 and no network. Files come from the package index that
pip is set up with, and stay below `.carry`; `benchmarks.gpu.unpack` takes them apart over there.
"""

import argparse
import io
import lzma
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRY = ROOT / ".carry"
FIRST, SECOND = "first", "second"

LIMIT_BYTES = 64 * 2**20
"""Of one transfer, the repository's own files included."""

VLLM = "0.32.0"
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
"""Imported on CUDA without a way around it; it fills the first transfer by itself."""
LIBRARIES = ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
"""Attention on Hopper, and the routing of experts. Others are left out: what needs them is not run."""
SUFFIXES = frozenset({".py", ".json", ".jinja", ".yaml", ".txt"})
"""What vLLM reads of its own package while it runs; sources of kernels and pages are left out."""

WHEELS = (
    "alembic",
    "annotated-doc",
    "annotated-types",
    "cachetools",
    "cbor2",
    "compressed-tensors",
    "cronsim",
    "datasets",
    "dill",
    "fastapi",
    "httpcore2",
    "httptools",
    "httpx2",
    "loguru",
    "mako",
    "msgspec",
    "multiprocess",
    "partial-json-parser",
    "prometheus-fastapi-instrumentator",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "python-dotenv",
    "pyzmq",
    "sqlalchemy",
    "starlette",
    "truststore",
    "typing-inspection",
    "tzdata",
    "uvicorn",
)
"""What the machine lacks. Not huggingface-hub: its transformers refuses the one that we are pinned to."""

EARLY_WHEELS = ("sqlalchemy", "alembic", "compressed-tensors", "datasets")
"""What the first transfer has room for beside the kernels, without SQLAlchemy's compiled modules: all of them
are there in Python as well.
"""
TAR_BLOCK = 512

ABSENT = ("openai", "openai_harmony", "llguidance", "psycopg", "xgrammar")
"""Large, imported, and never called here: a stub has every name, and nothing behind it."""

PINS = ROOT / "requirements" / "cpu.txt"
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:", "--no-deps")
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")

STUB = '''"""Stands in for a package that is not here: every name can be imported, and nothing works."""

import carried_stub

carried_stub.stand_in(__name__)
'''


class TooLarge(Exception):
    """A transfer beyond its limit; the message names what does not fit."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A folder of files that travel together."""

    folder: Path

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}


def main() -> int:
    """Build both transfers and say their sizes; return 1 if one does not fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.carry", description=__doc__)
    parser.add_argument("--to", type=Path, default=CARRY, help="default: .carry")
    options = parser.parse_args()
    downloads = options.to / "downloads"
    vllm = download([f"vllm=={VLLM}"], downloads / "vllm")[0]
    wheels = download(requirements(PINS.read_text(), WHEELS), downloads / "wheels")
    own = repository_bytes()
    first, second = (options.to / name for name in (FIRST, SECOND))
    for folder in (first, second):
        folder.mkdir(exist_ok=True)
    kernels, libraries, python = (f"{name}-{VLLM}.tar.xz" for name in ("kernels", "libraries", "python"))
    with zipfile.ZipFile(vllm) as wheel:
        pack(first / kernels, members(wheel, [KERNELS]))
        pack(second / libraries, members(wheel, LIBRARIES))
        pack(second / python, members(wheel, python_files(wheel)))
    keep_only(first, [kernels])
    keep_only(second, [libraries, python])
    pack(second / "own.tar.xz", own_files())
    early = [path for path in wheels if distribution(path).split("==")[0] in EARLY_WHEELS]
    pack(first / "packages-early.tar.xz", (file for file in unzipped(early) if not file[0].endswith(".so")))
    pack(second / "packages.tar.xz", unzipped([path for path in wheels if path not in early]))
    try:
        for name in (FIRST, SECOND):
            print(report(name, Transfer(options.to / name).sizes, own))
    except TooLarge as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def report(name: str, sizes: Mapping[str, int], own_bytes: int) -> str:
    """Return what a transfer's files come to. Raises TooLarge, which names the file that does not fit."""
    total = own_bytes
    for file, size in sorted(sizes.items(), key=lambda item: item[1]):
        if total + size > LIMIT_BYTES:
            raise TooLarge(
                f"transfer {name}: {file} has {size / 1e6:.1f} MB and does not fit: {total / 1e6:.1f} MB "
                f"of {LIMIT_BYTES / 1e6:.1f} are taken: leave a package out, or move it to the other transfer"
            )
        total += size
    lines = [f"{file:50} {size / 1e6:6.1f} MB" for file, size in sizes.items()]
    lines.append(f"{'the repository':50} {own_bytes / 1e6:6.1f} MB")
    return "\n".join([f"transfer {name}: {total / 1e6:.1f} MB of {LIMIT_BYTES / 1e6:.1f}", *lines, ""])


def requirements(pins: str, names: Sequence[str]) -> list[str]:
    """Return `name==version` of each name, as `requirements/cpu.txt` pins it. Raises KeyError for another."""
    pinned = dict(line.split(" ")[0].split("==") for line in pins.splitlines() if "==" in line)
    return [f"{name}=={pinned[name]}" for name in names]


def download(wanted: Sequence[str], folder: Path) -> list[Path]:
    """Return wheels for the machine; what an earlier call left is not fetched again."""
    platforms = [word for one in PLATFORMS for word in ("--platform", f"{one}_x86_64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", *TARGET, *platforms]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*pip, "--dest", str(folder), *wanted], check=True)
    found = {distribution(path): path for path in folder.glob("*.whl")}
    return [found[requirement] for requirement in wanted]


def distribution(wheel: Path) -> str:
    """Return `name==version` of a wheel's file name."""
    name, version, *_ = wheel.name.split("-")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def unzipped(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield what is in wheels: xz makes a quarter less of it."""
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            yield from members(wheel, [name for name in wheel.namelist() if not name.endswith("/")])


def python_files(wheel: zipfile.ZipFile) -> list[str]:
    """Return the files of the package that are read while it runs, and its metadata but for the record."""
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    package = [name for name in names if name.startswith("vllm/") and Path(name).suffix in SUFFIXES]
    metadata = [name for name in names if ".dist-info/" in name and not name.endswith("/RECORD")]
    return [*package, *metadata]


def members(wheel: zipfile.ZipFile, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each file's name and content."""
    for name in names:
        yield name, wheel.read(name)


def own_files() -> Iterator[tuple[str, bytes]]:
    """Yield what makes this repository an installed package of its own, and the stubs."""
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    lines = [f"Name: {project['name']}", f"Version: {project['version']}"]
    yield f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]).encode()
    groups = project["entry-points"]
    entries = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items()
    ]
    yield f"{info}/entry_points.txt", "\n".join(entries).encode()
    yield "carried_stub.py", Path(__file__).with_name("stub.py").read_bytes()
    for name in ABSENT:
        yield f"{name}/__init__.py", STUB.encode()


def pack(archive: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files into `archive`, as small as xz makes them; an archive that is there already is kept."""
    if archive.exists():
        return
    partial = archive.with_suffix(".partial")
    with lzma.open(partial, "wb", preset=9) as sink, tarfile.open(fileobj=sink, mode="w") as tar:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    partial.rename(archive)


def keep_only(folder: Path, names: Sequence[str]) -> None:
    """Delete every other file: what an earlier build left, and what is quickly made anew."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def repository_bytes() -> int:
    """Return the bytes, as in tar, of the files that travel with every transfer: tracked and new ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    files = [ROOT / name for name in names if name]
    sizes = [path.stat().st_size for path in files if path.is_file() and not path.is_symlink()]
    return sum(TAR_BLOCK * (1 + -(-size // TAR_BLOCK)) for size in sizes)


if __name__ == "__main__":
    sys.exit(main())
