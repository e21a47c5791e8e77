"""`python -m tests.fuzz.readers NAME FOLDER [libFuzzer's options]`: one reader, fed with damaged files.

A reader raises its own errors over any bytes. Whatever else it raises, or taking more than two gigabytes,
ends the run, and the input is left in FOLDER. The seeds are what earlier versions wrote.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["schemas"]):
    from schemas.dataset.errors import DatasetError
    from schemas.dataset.files import LocalFile
    from schemas.dataset.index import read_index
    from schemas.dataset.jobs_table import JobEntry, JobsTable, table_of
    from schemas.dataset.manifest import read_manifest
    from schemas.dataset.norm import read_norm_file
    from schemas.dataset.shard import open_shard
    from schemas.dataset.token_counts import read_counts
    from schemas.identity import FinalNorm
    from schemas.receipts import FROM_CONNECTOR, TO_CONNECTOR, SkipRow, UnitOpened, line

from tests.support.plans import identity, order

FROZEN = Path(__file__).parents[1] / "frozen" / "datasets"
NORM = FinalNorm(kind="rmsnorm", eps=1e-6)
Reader = Callable[[Path, bytes], object]


def _shard(file: Path, data: bytes) -> None:
    with open_shard(file) as shard:
        for row in range(len(shard.light)):
            for layer_id in shard.provenance.identity.layer_ids:
                shard.layer_bytes(row, layer_id)


def _socket(file: Path, data: bytes) -> None:
    for side in (FROM_CONNECTOR, TO_CONNECTOR):
        try:
            side.validate_json(data)
        except ValueError:  # what both ends catch
            continue


def _jobs_table(file: Path, data: bytes) -> None:
    try:
        JobsTable.model_validate_json(data)
    except ValueError:
        return


READERS: dict[str, Reader] = {
    "shard": _shard,
    "index": lambda file, data: read_index(file),
    "counts": lambda file, data: read_counts(data, "counts"),
    "manifest": lambda file, data: read_manifest(data, "manifest"),
    "jobs": _jobs_table,
    "norm": lambda file, data: read_norm_file(LocalFile(file), NORM, 64),
    "socket": _socket,
}
SEEDS = {
    "shard": "data/*/*.parquet",
    "index": "index/*/*.parquet",
    "counts": "token_freq/*.parquet",
    "manifest": "manifests/*.json",
    "norm": "*.safetensors",
}
"""Where they are in a dataset; the others' are made."""


def seeds_of(name: str) -> Iterator[bytes]:
    """Yield files, or lines, that the reader takes."""
    if name in SEEDS:
        for path in sorted(FROZEN.glob(f"*/{SEEDS[name]}")):
            yield path.read_bytes()
    elif name == "jobs":
        for path in sorted(FROZEN.glob("*/manifests/*.json")):
            content = path.read_bytes()
            yield table_of([JobEntry.of(read_manifest(content, path.name)[0], content)]).encode()
    else:
        told = order(identity(), 2)
        for message in (
            told,
            SkipRow(attempt_id=told.attempt_id, row=1),
            UnitOpened(attempt_id=told.attempt_id, rank=0),
        ):
            yield line(message)


def read_one(reader: Reader, file: Path, data: bytes) -> None:
    """Put the bytes into the file and read it; its own errors are what is expected."""
    file.write_bytes(data)
    try:
        reader(file, data)
    except (DatasetError, OSError):
        return


def main() -> None:
    """Fuzz until the options say that it is enough."""
    name, folder, *options = sys.argv[1:]
    with TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds_of(name)):
            (corpus / str(number)).write_bytes(seed)
        act = partial(read_one, READERS[name], Path(scratch) / "file")
        limits = ["-rss_limit_mb=2048", "-timeout=60", f"-artifact_prefix={folder}/{name}-"]
        atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], act)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
