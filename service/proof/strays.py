"""Files of a dataset that no manifest names: of a job that is not complete, or no part of any."""

from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from schemas.names import (
    FINAL_NORM_PATH,
    MANIFEST_FOLDER,
    is_job_id,
    is_manifest,
    job_folders,
    token_freq_path,
)
from service.proof.tally import Finding

_DATA_FOLDERS = frozenset({"data", "index", MANIFEST_FOLDER})
_DATA_SUFFIXES = frozenset({".parquet", ".safetensors"})
_UNFINISHED = f"{MANIFEST_FOLDER}/."
"""How the path of a manifest begins while it is written, or where its writer was killed."""


def strays(
    paths: Iterable[str], named: Collection[str], complete: Collection[str], unread: Collection[str]
) -> tuple[list[Finding], tuple[str, ...]]:
    """Return the data files that are not `named`, and the jobs beside the `complete` ones that have files.

    The files of the latter are no fault: units are stored long before the manifest, and stay where the job is
    cancelled or fails. Nor are those of a job whose manifest is among the `unread` files: it may name them.
    """
    found, others = list[Finding](), set[str]()
    for name in paths:
        path = PurePosixPath(name)
        if name in named or is_manifest(name) or name.startswith(_UNFINISHED):
            continue
        if name == FINAL_NORM_PATH and (unread or not complete):
            continue  # stored before the first manifest
        job_id = job_of(name)
        if f"{MANIFEST_FOLDER}/{job_id}.json" in unread:
            continue
        if job_id is not None and job_id not in complete:
            others.add(job_id)
        elif path.parts[0] in _DATA_FOLDERS or path.suffix in _DATA_SUFFIXES:
            found.append(Finding(path=name, what="no manifest names this file"))
    return found, tuple(sorted(others))


def job_of(name: str) -> str | None:
    """Return the job whose folders, or counts of tokens, a path is in."""
    path = PurePosixPath(name)
    folders = set(map(str, path.parents))
    for part in filter(is_job_id, (*path.parts[1:2], path.stem)):
        if str(path) == token_freq_path(part) or not folders.isdisjoint(job_folders(part)):
            return part
    return None
