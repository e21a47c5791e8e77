"""What every run of the crash suite must end with: the dataset of an undisturbed run, to the byte."""

import hashlib
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import torch

from schemas.names import CARD_PATH, JOBS_PATH, job_id_from_content, manifest_path
from service.proof.verify import verify_dataset
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration
from tests.support.fake_engine import DTYPES, states_TH
from tests.support.jobs import FAKE_ENGINE, conversations, request
from tests.support.tiny_model import random_target

KEY = "a job"
JOB = job_id_from_content(KEY)
NUM_SAMPLES = 10
LAYERS = (1, 2)
TIMED = {CARD_PATH, JOBS_PATH, manifest_path(JOB)}
"""Files that say when the job was captured."""


def tree(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a dataset, by its path there.

    A manifest says which attempt made a shard and when, and seals itself; the table of jobs says how it is
    sealed, and the card when. They are hashed without these.
    """
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_content(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _content(path: Path) -> bytes:
    if path.name == JOBS_PATH:
        (job,) = json.loads(path.read_bytes())["jobs"]
        left_out = {"captured_at", "manifest", "manifest_git_oid"}
        return json.dumps({name: value for name, value in job.items() if name not in left_out}).encode()
    if path.name == CARD_PATH:
        return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", path.read_bytes())
    if path.parent.name != "manifests":
        return path.read_bytes()
    manifest = json.loads(path.read_bytes())
    del manifest["sha256"], manifest["captured_at"]
    for shard in manifest["shards"]:
        del shard["epoch"]
    return json.dumps(manifest).encode()


def make_target(folder: Path) -> Path:
    return random_target(folder / "models" / "target", layers=4, hidden=64, max_position=512)


def service(data_dir: Path, target: Path, **changes: object) -> Settings:
    """Return the settings of a service whose data folder is `data_dir`; leases are as short as can be."""
    values = {
        "model_roots": (target.parent,),
        "engine": FAKE_ENGINE,
        "pool_bytes": 2**20,
        "poll_s": 0.1,
        "lease_s": 1.0,
        "drain_s": 5.0,
    }
    return Settings(data_dir=data_dir, **(values | changes))


def submit(settings: Settings, target: Path, num_samples: int = NUM_SAMPLES, **changes: object) -> None:
    """Make the service's folder, and a job in it of some units, the first of several rows."""
    settings.data_dir.mkdir(parents=True)
    store = Store(settings.database())
    store.write(migration.migrate)
    samples = conversations(num_samples, longest=20)
    body = {"layers": LAYERS, "storage": {"shard_bytes": 98_304}} | changes
    store.write(jobs.submit, NewJob.of(JOB, KEY, request(target, samples, **body)))
    store.close()


def assert_right(dataset: Path, target: Path, num_samples: int = NUM_SAMPLES) -> None:
    """Every sample is there once, every state is the fake engine's, and the dataset verifies."""
    rows = [
        row for shard in sorted(dataset.rglob("data/*/*.parquet")) for row in pq.read_table(shard).to_pylist()
    ]
    assert sorted(row["source_id"] for row in rows) == sorted(f"c{number}" for number in range(num_samples))
    for row in rows:
        for layer in LAYERS:
            raw = torch.frombuffer(bytearray(row[f"layer_{layer}"]), dtype=DTYPES["bfloat16"])
            expected = states_TH(row["input_ids"], layer, row["hidden_size"], "bfloat16")
            assert torch.equal(raw.view_as(expected), expected)
    report = verify_dataset(dataset, model_folder=target)
    assert report.ok, report.findings
