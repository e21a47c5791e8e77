"""Reads the manifests of a dataset, and holds each against itself."""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from schemas.dataset.entries import FileEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.jobs_table import JobEntry
from schemas.dataset.manifest import Manifest, read_manifest
from schemas.names import FINAL_NORM_PATH, index_path, manifest_path, token_freq_path
from service.artifacts.dataset_files import MANIFEST_BYTES, Files, read_file
from service.proof.tally import Finding


def read_manifests(files: Files, findings: list[Finding], rows: dict[str, JobEntry]) -> Iterator[Manifest]:
    """Yield every readable manifest; append what is wrong with any of them to `findings`.

    Add to `rows`, by the manifest's path, the row that the table of jobs should have for it.
    """
    for path in files.manifests():
        try:
            content = read_file(files, path, MANIFEST_BYTES)
            manifest, fault = read_manifest(content, PurePosixPath(path).name)
        except (OSError, DatasetError, EOFError, MemoryError) as error:
            findings.append(Finding.of(path, error))
            continue
        if fault is not None:
            findings.append(Finding(path=path, what=fault))
        findings += [Finding(path=path, what=what) for what in _manifest_faults(path, manifest)]
        if path == manifest_path(manifest.provenance.job_id) and manifest.shards:
            rows[path] = JobEntry.of(manifest, content)
        yield manifest


def _manifest_faults(path: str, job: Manifest) -> Iterator[str]:
    totals, identity = job.totals, job.provenance.identity
    job_id = job.provenance.job_id
    units = {entry.unit for entry in job.shards}
    rows = sum(entry.rows for entry in job.shards)
    report, layer_ids = job.checks.canary_report, list(identity.layer_ids)
    pairs = {
        "file name": (path, manifest_path(job_id)),
        "identity_sha256": (job.identity_sha256, identity.sha256()),
        "layers": ([layer.vllm_id for layer in job.provenance.layers], layer_ids),
        "totals.samples_written": (totals.samples_written, rows),
        "totals.samples_rejected": (totals.samples_rejected, len(job.rejects)),
        "totals.samples_planned": (totals.samples_planned, rows + len(job.rejects)),
        "totals.tokens": (totals.tokens, sum(entry.tokens for entry in job.shards)),
        "totals.bytes": (totals.bytes, sum(entry.bytes for entry in job.shards)),
        "checks.canary_report.layers": (
            layer_ids if report is None else [layer.layer_id for layer in report.layers],
            layer_ids,
        ),
        "checks.rows_checked": (job.checks.rows_checked, rows),
        "indexes": (sorted(e.path for e in job.indexes), sorted(index_path(job_id, unit) for unit in units)),
        "extras": (sorted(e.path for e in job.extras), [FINAL_NORM_PATH, token_freq_path(job_id)]),
    }
    for name, (stated, expected) in pairs.items():
        if stated != expected:
            yield f"{name} is {stated!r}, expected {expected!r}"
    for shard in job.shards:
        if (measured := [layer.layer_id for layer in shard.layers]) != layer_ids:
            yield f"the layers of {shard.path} are {measured!r}, expected {layer_ids!r}"
    for entry, count in Counter(entry.path for entry in entries_of(job)).items():
        if count > 1:
            yield f"names {entry} {count} times"


def entries_of(job: Manifest) -> tuple[FileEntry, ...]:
    """Return every file that a manifest names."""
    return (*job.shards, *job.indexes, *job.extras)
