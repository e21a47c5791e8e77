"""A right dataset of two units, and ways to change it as a fault would."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.dataset.jobs_table import JobEntry, table_of
from schemas.dataset.manifest import body_sha256, read_manifest
from schemas.dataset.shard import open_shard
from schemas.names import JOBS_PATH, index_path, manifest_path, shard_path, token_freq_path
from service.proof.verify import VerifyReport, verify_dataset
from tests.support.plans import JOB
from tests.support.shards import (
    Capture,
    ShardRow,
    write_manifest,
    write_unit,
)

SHARD, INDEX, MANIFEST = shard_path(JOB, 1), index_path(JOB, 1), manifest_path(JOB)
COUNTS = token_freq_path(JOB)
UNITS = 2


@dataclass(frozen=True, slots=True)
class Dataset:
    folder: Path
    units: dict[int, Capture]

    @property
    def model(self) -> Path:
        return self.units[0].model.folder

    def verify(self, **options: object) -> VerifyReport:
        return verify_dataset(self.folder, **({"model_folder": self.model} | options))

    def rewrite(self, rows: list[ShardRow]) -> None:
        """Put other rows into unit 1, with index and manifest to match."""
        write_unit(self.folder, self.units[1], rows, 1)
        write_manifest(self.folder, self.units[1].provenance, {0: self.units[0].rows, 1: rows})

    def edit_manifest(self, change: Callable[[dict], None]) -> None:
        """Change the manifest's document and sign it again."""
        path = self.folder / MANIFEST
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))


def write_table(folder: Path, change: Callable[[list[dict[str, Any]]], object] = lambda rows: None) -> None:
    content = (folder / MANIFEST).read_bytes()
    document = json.loads(table_of([JobEntry.of(read_manifest(content, MANIFEST)[0], content)]))
    change(document["jobs"])
    (folder / JOBS_PATH).write_text(json.dumps(document))


def said(report: VerifyReport) -> str:
    return "\n".join(f"{finding.path}: {finding.what}" for finding in report.findings)


def flip_in_layer_2(path: Path) -> None:
    data = bytearray(path.read_bytes())
    with open_shard(path) as shard:
        layer = b"".join(part.tobytes() for part in shard.layer_bytes(3, 2))
    data[data.find(layer) + 100] ^= 4
    path.write_bytes(data)


def make_it_end_its_process(path: Path) -> None:
    """One bit makes an empty histogram of a column's size statistics two long; pyarrow aborts its process."""
    data = bytearray(path.read_bytes())
    column = data.rfind(b"layer_1\x15\x00")
    at = data.find(b"\x19\x06\x19\x06\x00\x00", column) + 1
    assert 0 < column < at < column + 100
    data[at] ^= 0x20
    path.write_bytes(data)
