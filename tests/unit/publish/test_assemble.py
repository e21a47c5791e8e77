"""A job's folder becomes complete, or nothing says that it is."""

import locale
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset

from schemas.dataset import seal
from schemas.dataset.manifest import body_sha256
from schemas.dataset.seal import seal as seal_file, sha256_of
from schemas.names import CARD_PATH, JOBS_PATH, manifest_path
from service.errors import DatasetBroken, OptionRefused
from service.publish.assemble import Account, assemble, intact_manifest
from tests.support.finished_job import (
    FINAL_NORM,
    JOB,
    OTHER_JOB,
    OTHER_NORM,
    a_dataset,
    a_reject,
    an_account,
    layer_bytes,
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def finish(folder: Path, account: Account) -> None:
    assemble(folder, account, FINAL_NORM, "skipped by request", None)


def test_every_file_is_in_the_manifest_with_what_its_bytes_are(tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path)
    entries = [*manifest.shards, *manifest.indexes, *manifest.extras]
    assert {entry.path for entry in entries} | {manifest_path(JOB), CARD_PATH, JOBS_PATH} == set(
        files_of(tmp_path)
    )
    for entry in entries:
        assert sha256_of(tmp_path / entry.path) == (entry.sha256, entry.bytes)


def test_the_manifest_accounts_for_every_sample_and_token(tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path, num_units=3, rows=2, rejects=4)
    totals = manifest.totals
    assert (totals.samples_planned, totals.samples_written, totals.samples_rejected) == (10, 6, 4)
    assert totals.tokens == sum(shard.tokens for shard in manifest.shards)
    assert totals.supervised_tokens == totals.tokens - 6
    assert totals.bytes == sum(shard.bytes for shard in manifest.shards)
    checks = manifest.checks
    assert (checks.rows_checked, checks.logit_rows, checks.logit_argmax_agree) == (6, 3, 3)
    assert checks.logit_max_error == 2.25


def test_the_manifest_on_disk_is_the_one_returned_and_carries_its_own_digest(tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path)
    assert intact_manifest(tmp_path / manifest_path(JOB)) == manifest
    assert manifest.sha256 == body_sha256(manifest.model_dump(mode="json"))


def test_the_same_job_gives_the_same_bytes_however_often(tmp_path: Path) -> None:
    account = an_account(tmp_path / "a")
    finish(tmp_path / "a", account)
    first = files_of(tmp_path / "a")
    finish(tmp_path / "a", account)
    a_dataset(tmp_path / "b")
    finish(tmp_path / "b", account)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == first


Harm = Callable[[Path, Account], Account]


def first_commit(**changes: object) -> Harm:
    """Change what the first unit's commit says."""

    def harm(folder: Path, account: Account) -> Account:
        return replace(account, commits=(replace(account.commits[0], **changes), *account.commits[1:]))

    return harm


def file_of(kind: str, number: int, change: Callable[[Path], object]) -> Harm:
    """Change a file that the account names."""

    def harm(folder: Path, account: Account) -> Account:
        change(folder / getattr(account, kind)[number].path)
        return account

    return harm


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("harm", "detail"),
    [
        (
            lambda _, account: replace(account, commits=account.commits[:-1]),
            "7 samples were planned, 3 are written and 1 rejected",
        ),
        (
            lambda _, account: replace(account, rejects=()),
            "7 samples were planned, 6 are written and 0 rejected",
        ),
        (
            lambda _, account: replace(account, rejects=(*account.rejects, a_reject(99))),
            "7 samples were planned, 6 are written and 2 rejected",
        ),
        (file_of("shards", 1, Path.unlink), "train-00001.parquet is missing"),
        (file_of("shards", 0, cut), "were committed"),
        (first_commit(index=None), "unit 0 has shards and no index"),
        (file_of("indexes", 0, Path.unlink), "train-00000.parquet is missing"),
        (file_of("indexes", 0, lengthen), "were committed"),
        (first_commit(supervised_tokens=1), "the counts of tokens name 12, the units 7"),
        (first_commit(num_tokens=1), "tokens, the units"),
    ],
)
def test_an_account_that_does_not_add_up_leaves_no_manifest_and_every_file(
    tmp_path: Path, harm: Harm, detail: str
) -> None:
    account = harm(tmp_path, an_account(tmp_path))
    files = {path for path in files_of(tmp_path) if path.startswith(("data", "index"))}
    with pytest.raises(DatasetBroken, match=detail):
        finish(tmp_path, account)
    assert files <= files_of(tmp_path).keys()
    assert not (tmp_path / manifest_path(JOB)).exists()
    assert not (tmp_path / CARD_PATH).exists()


def test_another_model_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    a_dataset(tmp_path)
    with pytest.raises(OptionRefused):
        a_dataset(tmp_path, OTHER_JOB, final_norm=OTHER_NORM)
    assert not (tmp_path / manifest_path(OTHER_JOB)).exists()


def test_attempts_write_under_names_of_their_own_and_the_next_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = an_account(tmp_path)
    attempts: list[str] = []

    def killed(final: Path, attempt: str) -> None:
        attempts.append(attempt)
        final.with_name(f".{final.name}.0.tmp").write_text("half")
        seal_file(final, attempt)

    monkeypatch.setattr(seal, "seal", killed)
    finish(tmp_path, replace(account, attempt="1"))
    assert attempts == ["1"] * 5
    monkeypatch.setattr(seal, "seal", seal_file)
    (tmp_path / f".{CARD_PATH}.tmp").write_text("of an earlier version")
    assert len(list(tmp_path.rglob("*.tmp"))) == 6
    finish(tmp_path, replace(account, attempt="2"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_card_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    a_dataset(tmp_path)
    card = tmp_path / CARD_PATH
    card.write_text(card.read_text() + "F\u00fcr alle.\n", encoding="utf-8")
    usual = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        a_dataset(tmp_path)
    finally:
        locale.setlocale(locale.LC_CTYPE, usual)
    assert "F\u00fcr alle." in card.read_text(encoding="utf-8")
    card.write_bytes(b"F\xfcr alle.")
    with pytest.raises(DatasetBroken, match=r"README\.md is not UTF-8"):
        a_dataset(tmp_path, OTHER_JOB)


def test_something_else_in_place_of_a_manifest_is_named(tmp_path: Path) -> None:
    a_dataset(tmp_path)
    (tmp_path / "manifests" / "notes.json").write_text("{}")
    with pytest.raises(DatasetBroken, match=r"notes\.json"):
        a_dataset(tmp_path, OTHER_JOB)


def test_a_manifest_that_contradicts_its_own_digest_is_named(tmp_path: Path) -> None:
    path = tmp_path / manifest_path(a_dataset(tmp_path).provenance.job_id)
    path.write_text(path.read_text().replace('"samples_rejected": 1', '"samples_rejected": 0'))
    with pytest.raises(
        DatasetBroken, match=f"^{manifest_path(JOB)} was changed after it was made: its sha256"
    ):
        intact_manifest(path)


def test_datasets_streams_what_the_manifests_name(tmp_path: Path) -> None:
    """Its globs take what lies in a job's folders: what the manifest does not name is removed from there."""
    a_dataset(tmp_path)
    earlier = an_account(tmp_path, OTHER_JOB, num_units=3)
    a_dataset(tmp_path, OTHER_JOB)
    for entry in (earlier.shards[2], earlier.indexes[2]):
        assert not (tmp_path / entry.path).exists()
    light = list(load_dataset(str(tmp_path), split="train", streaming=True))
    states = list(load_dataset(str(tmp_path), "states", split="train", streaming=True))
    assert [row["sample_id"] for row in light] == [row["sample_id"] for row in states]
    assert len(light) == 12
    assert states[3]["layer_2"] == states[9]["layer_2"] == layer_bytes(1, 0, 2)
