"""Reads the manifests of a dataset, and notes where one contradicts itself."""

from collections.abc import Iterator

from schemas.dataset.errors import DatasetError
from schemas.dataset.jobs_table import JobEntry
from schemas.dataset.manifest import Manifest, read_manifest
from schemas.names import manifest_path
from service.artifacts.dataset_files import MANIFEST_BYTES, Files, read_file
from service.proof.tally import Finding


def read_manifests(files: Files, findings: list[Finding], rows: dict[str, JobEntry]) -> Iterator[Manifest]:
    """Yield every readable manifest; append what is wrong with any of them to `findings`.

    Add to `rows`, by the manifest's path, the row that the table of jobs should have for it.
    """
    for path in files.manifests():
        try:
            content = read_file(files, path, MANIFEST_BYTES)
            manifest, contradictions = read_manifest(content, path)
        except (OSError, DatasetError, EOFError, MemoryError) as error:
            findings.append(Finding.of(path, error))
            continue
        findings += [Finding(path=path, what=what) for what in contradictions]
        if path == manifest_path(manifest.provenance.job_id):
            rows[path] = JobEntry.of(manifest, content)
        yield manifest
