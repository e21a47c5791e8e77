"""Draft vocabularies come from the dataset's own counts, and from its rows where there are none."""

import json
import shutil

import pytest
import torch

from schemas.dataset.manifest import body_sha256
from service.errors import DatasetBroken
from service.export.options import Algorithm
from service.export.run import export
from service.export.source import open_source
from service.export.vocabulary import token_counts
from service.reader.places import Places
from tests.contract.export.conftest import wanted
from tests.contract.reader.conftest import finished
from tests.support.jobs import Shop, conversations, request


@pytest.fixture
def copy(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "copy")
    return tmp_path / "copy"


def counted(folder) -> dict[int, int]:
    return token_counts(open_source(str(folder), wanted("modelopt")))


def test_the_counts_of_the_dataset_are_taken_without_looking_at_a_row(dataset, counts, monkeypatch):
    monkeypatch.delattr(Places, "supervised_counts")
    monkeypatch.delattr(Places, "light")
    assert counted(dataset) == counts
    assert list(counted(dataset)) == sorted(counts)


def test_a_dataset_without_its_counts_is_counted(copy, counts):
    shutil.rmtree(copy / "token_freq")
    assert counted(copy) == counts
    assert list(counted(copy)) == sorted(counts)


def test_a_manifest_that_names_no_counts_is_no_reason_to_stop(copy, counts):
    (manifest,) = copy.glob("manifests/*.json")
    body = json.loads(manifest.read_text())
    body["extras"] = [entry for entry in body["extras"] if not entry["path"].startswith("token_freq")]
    manifest.write_text(json.dumps(body | {"sha256": body_sha256(body)}))
    assert counted(copy) == counts


def test_counts_of_another_dataset_are_refused(copy, target, tmp_path):
    (counts,) = copy.glob("token_freq/*.parquet")
    other = finished(tmp_path / "other", target, loss="all")
    shutil.copy(next(other.glob("token_freq/*.parquet")), counts)
    with pytest.raises(DatasetBroken, match="is not the file that the manifest names"):
        counted(copy)


def test_the_counts_of_all_jobs_that_are_exported_add_up(target, tmp_path):
    shop = Shop.open(tmp_path, target)
    try:
        jobs = [
            shop.run(request(target, conversations(4), loss=loss), key=loss) for loss in ("all", "assistant")
        ]
        first, second = (shop.settings.dataset_dir(job.id) for job in jobs)
    finally:
        shop.store.close()
    due = counted(first)
    for token, count in counted(second).items():
        due[token] = due.get(token, 0) + count
    for part in ("data", "index", "manifests", "token_freq"):
        shutil.copytree(second / part, first / part, dirs_exist_ok=True)
    assert counted(first) == dict(sorted(due.items()))
    for file in first.glob("token_freq/*.parquet"):
        file.unlink()
    assert counted(first) == dict(sorted(due.items()))


def test_where_rows_are_left_out_their_tokens_are_not_counted(dataset, truths, tmp_path):
    pairs = [row for row in truths if bool(((row.mask[1:] == 1) & (row.mask[:-1] == 1)).any())]
    options = wanted("specforge", algorithm=Algorithm.DFLASH, draft_vocab=12)
    export(str(dataset), tmp_path / "out", options)
    made = torch.load(tmp_path / "out/vocab_mapping.pt", weights_only=True)
    every = torch.cat([row.ids[row.mask == 1] for row in pairs])
    ids, times = every.unique(return_counts=True)
    order = sorted(zip((-times).tolist(), ids.tolist(), strict=True))
    assert made["t2d"].nonzero().flatten().tolist() == sorted(token for _, token in order[:12])
