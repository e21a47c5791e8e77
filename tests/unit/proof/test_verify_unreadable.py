"""Files and folders of a dataset that cannot be read, or have names that none should have."""

import errno
import json
import os
from pathlib import Path

import pytest

from schemas.dataset import seal
from schemas.names import FINAL_NORM_PATH, JOBS_PATH
from service.proof import verify
from service.proof.tally import Finding
from tests.support.shards import LENGTHS
from tests.unit.proof.made_dataset import INDEX, MANIFEST, SHARD, UNITS, said, write_table


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_read(dataset, monkeypatch):
    read = seal.sha256_of

    def broken(path: Path, *options: object) -> tuple[str, int]:
        if path.name == Path(SHARD).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *options)

    monkeypatch.setattr(verify, "sha256_of", broken)
    report = dataset.verify()
    what = "cannot be read: Input/output error"
    assert set(report.findings) == {Finding(path=path, what=what, unread=True) for path in (SHARD, INDEX)}
    assert (report.ok, report.rows) == (False, len(LENGTHS))
    assert str(report).splitlines()[-1] == "the dataset is not read whole: 2 errors"
    (dataset.folder / FINAL_NORM_PATH).write_bytes(b"")
    report = dataset.verify()
    assert {finding.path for finding in report.findings} == {SHARD, INDEX, FINAL_NORM_PATH}
    assert report.verdict == "BROKEN"


@pytest.mark.parametrize("name", [MANIFEST, JOBS_PATH])
@pytest.mark.parametrize("how", ["open", "preadv"])
def test_a_record_that_cannot_be_read_is_no_fault_of_the_dataset(dataset, name, how, monkeypatch):
    """On a failing disk, or where this user may not read it; the rest of the dataset is read."""
    write_table(dataset.folder)
    real, wanted = getattr(os, how), dataset.folder / name

    def broken(file: Path | int, *options: object) -> object:
        if Path(f"/proc/self/fd/{file}" if how == "preadv" else file).resolve() == wanted:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return real(file, *options)

    monkeypatch.setattr(os, how, broken)
    report = dataset.verify()
    (finding,) = report.findings
    assert (finding.path, finding.unread) == (name, True)
    assert "Input/output error" in finding.what
    assert report.rows == (0 if name == MANIFEST else UNITS * len(LENGTHS))
    assert report.verdict == "not read whole"


def test_a_name_that_no_file_can_have_is_named(dataset):
    long = "x" * 300
    dataset.edit_manifest(lambda body: body["extras"][0].update(path=long))
    assert f"{long}: is missing" in said(dataset.verify())


def test_a_name_that_is_not_utf8_is_spelled_out(dataset):
    os.close(os.open(os.fsencode(dataset.folder) + b"/data/\xff.parquet", os.O_CREAT))
    report = dataset.verify()
    assert said(report) == "data/\\udcff.parquet: no manifest names this file"
    assert json.loads(report.model_dump_json())["findings"][0]["path"] == "data/\\udcff.parquet"


def test_a_pipe_in_a_manifests_place_is_not_waited_for(dataset):
    (dataset.folder / MANIFEST).unlink()
    os.mkfifo(dataset.folder / MANIFEST)
    assert f"{MANIFEST}: cannot be opened: it is a pipe" in said(dataset.verify())


def test_a_manifest_that_links_to_itself_is_named(dataset):
    (dataset.folder / MANIFEST).unlink()
    (dataset.folder / MANIFEST).symlink_to(Path(MANIFEST).name)
    assert f"{MANIFEST}: cannot be opened: Too many" in said(dataset.verify())


def test_folders_that_are_links_are_read(dataset, tmp_path, monkeypatch):
    """Another disk holds the states, as a reader and an export allow; two links lead back and out."""
    for name in ("data", "manifests"):
        (dataset.folder / name).rename(tmp_path / name)
        (dataset.folder / name).symlink_to(tmp_path / name)
    (dataset.folder / "index/again").symlink_to(dataset.folder)
    (dataset.folder / "index/above").symlink_to(tmp_path)
    (tmp_path / "another.parquet").write_bytes(b"x")
    report = dataset.verify()
    assert report.ok, said(report)
    assert report.rows == UNITS * len(LENGTHS)
    (tmp_path / "data/extra.parquet").write_bytes(b"x")
    assert said(dataset.verify()) == "data/extra.parquet: no manifest names this file"
    monkeypatch.chdir(tmp_path / "data")  # a parent of this path by its text alone
    report = verify.verify_dataset(Path(os.path.relpath(dataset.folder)))
    assert said(report) == "data/extra.parquet: no manifest names this file"


def test_a_folder_that_cannot_be_listed_ends_the_reading(dataset, monkeypatch):
    """What is in it is not known: without the manifests the dataset would not be complete yet."""
    listed = os.scandir

    def denied(path: Path) -> object:
        if Path(path).name == "manifests":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="manifests"):
        dataset.verify()
