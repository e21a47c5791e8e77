"""Unpacks what was carried to a bare GPU machine: `python3 -m benchmarks.gpu.unpack`. Standard library alone.

Archives below `.carry` are taken apart into one folder, which `benchmarks.gpu` puts first on the
path of its parts. Each is unpacked once.
"""

import argparse
import compileall
import sys
import tarfile
from pathlib import Path

CARRY = Path(__file__).parents[2] / ".carry"
SITE = CARRY / "site"
DONE = "unpacked.txt"
"""Lists the names of what was unpacked into the folder."""


def main() -> int:
    """Unpack every transfer that is here."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.unpack", description=__doc__)
    parser.add_argument("--from", dest="carry", type=Path, default=CARRY, help="default: .carry")
    parser.add_argument("--to", type=Path, default=SITE, help="default: .carry/site")
    options = parser.parse_args()
    new = unpack(options.carry, options.to)
    if new:  # else every process of every part would compile it
        compileall.compile_dir(options.to, quiet=2, workers=0)
    print(f"unpacked {len(new)} files into {options.to}")
    return 0


def unpack(carry: Path, site: Path) -> list[str]:
    """Unpack what the folders of `carry` hold and `site` has not; return the names of these files."""
    site.mkdir(parents=True, exist_ok=True)
    done = site / DONE
    before = set(done.read_text().split()) if done.exists() else set()
    new = []
    for path in sorted(path for name in ("first", "second") for path in carry.glob(f"{name}/*")):
        if path.name in before:
            continue
        with tarfile.open(path) as archive:
            archive.extractall(site, filter="data")
        new.append(path.name)
        with done.open("a") as sink:
            sink.write(f"{path.name}\n")
    return new


if __name__ == "__main__":
    sys.exit(main())
