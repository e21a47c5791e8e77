"""What samples cost that a plan or a schedule knows: `python -m benchmarks.known_hashes [MILLIONS] [seen]`.

With `seen` only the samples that a plan has so far are measured, which takes no database.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sqlalchemy import insert, text

from schemas.dataset.columns import CONTENT_HASH_BYTES
from schemas.source import Sample
from service.plan.content_hashes import KnownHashes, SeenHashes, content_hash, write_hashes
from service.store import Store, captured_samples
from service.store.schedule_tables import CAPTURED_SAMPLES
from tests.support.nights import Nights, row
from tests.support.pg import running_postgres
from tests.support.tiny_model import random_target

UNIT_SAMPLES = 4096
ROWS = 100_000
"""Of the source that is planned: all of them are known."""


def measure(url: str, folder: Path, num_keys: int) -> dict[str, float | str]:
    """Store so many keys, load them as a planner does, and plan a source whose rows are among them."""
    database = url.partition(":")[0]
    nights = Nights.open(folder, random_target(folder / "model", hidden=64), url)
    nights.drop([0])
    nights.night()
    job, store = nights.job(), nights.store
    assert job.identity is not None
    recipe = job.identity.recipe_sha256()
    keys = [content_hash(Sample.model_validate(row(number))) for number in range(ROWS)]
    packed = np.random.default_rng(1).bytes((num_keys - ROWS) * CONTENT_HASH_BYTES) + b"".join(keys)
    step = UNIT_SAMPLES * CONTENT_HASH_BYTES
    values = {"schedule": 1, "recipe": recipe, "job_id": job.id}
    began = time.monotonic()
    for unit, start in enumerate(range(0, len(packed), step), 1):
        with store.writing() as tx:
            part = {"unit": unit, "content_hashes": packed[start : start + step]}
            tx.connection.execute(insert(CAPTURED_SAMPLES).values(values | part))
    stored = time.monotonic()
    path = folder / "keys"
    write_hashes(path, [store.read(captured_samples.hashes, 1, recipe, job.id)], "")
    loaded = time.monotonic()
    anonymous = _memory("RssAnon")
    known = KnownHashes(path)
    assert all(key in known for key in keys)
    searched = time.monotonic()
    nights.drop(range(ROWS))
    nights.submit()
    planning = time.monotonic()
    nights.shop.plan()
    planned = time.monotonic()
    assert nights.job().progress.samples_known == ROWS + 1, nights.job().problem
    return {
        "database": database,
        "keys": num_keys,
        "bytes_a_key": _stored_bytes(store, database) / num_keys,
        "commit_us_a_key": (stored - began) / num_keys * 1e6,
        "load_and_sort_s": loaded - stored,
        "search_us": (searched - loaded) / ROWS * 1e6,
        "own_memory_mib": (_memory("RssAnon") - anonymous) / 2**10,
        "plan_known_us_a_row": (planned - planning - (loaded - stored)) / ROWS * 1e6,
    }


def measure_seen(folder: Path, num_keys: int) -> dict[str, float | str]:
    """Add so many keys as a plan does, none of which was there, and then the last of them again."""
    seen, draw = SeenHashes(folder), np.random.default_rng(1)
    before, own_kib, packed = _memory("RssAnon"), 0, b""
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(0, num_keys, ROWS):
        packed = draw.bytes(ROWS * CONTENT_HASH_BYTES)
        assert all(map(seen.add, _split(packed)))
        own_kib = max(own_kib, _memory("RssAnon") - before)
    added, cpu_added = time.monotonic(), time.process_time()
    assert not any(map(seen.add, _split(packed)))
    return {
        "seen_keys": num_keys,
        "add_us": (added - began) / num_keys * 1e6,
        "add_cpu_us": (cpu_added - cpu) / num_keys * 1e6,
        "add_again_cpu_us": (time.process_time() - cpu_added) / ROWS * 1e6,
        "own_memory_mib": own_kib / 2**10,
        "mapped_mib": num_keys * CONTENT_HASH_BYTES / 2**20,
    }


def _split(packed: bytes) -> Iterator[bytes]:
    return (packed[start : start + CONTENT_HASH_BYTES] for start in range(0, len(packed), CONTENT_HASH_BYTES))


SIZES = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql+psycopg": "SELECT pg_total_relation_size('captured_samples')",
}


def _stored_bytes(store: Store, database: str) -> int:
    with store.reading() as tx:
        return int(tx.connection.scalar(text(SIZES[database])) or 0)


def _memory(name: str) -> int:
    """Return a field of this process's status, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1])  # type: ignore[index]


def main() -> None:
    """Print a JSON object for the keys of a plan, and one for each database."""
    num_keys = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure_seen(Path(scratch), num_keys)), flush=True)
    if "seen" in sys.argv:
        return
    with tempfile.TemporaryDirectory() as scratch, running_postgres() as server, server.database() as lent:
        for name, url in (("sqlite", f"sqlite:///{scratch}/quarry.db"), ("postgresql", lent)):
            folder = Path(scratch) / name
            folder.mkdir()
            print(json.dumps(measure(url, folder, num_keys)), flush=True)


if __name__ == "__main__":
    main()
