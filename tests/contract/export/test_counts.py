"""Draft vocabularies come from the tokens that the index says are supervised."""

import shutil

import torch

from service.export.options import Algorithm
from service.export.run import export
from service.export.source import open_dataset
from service.export.vocabulary import token_counts
from tests.contract.export.conftest import wanted
from tests.support.jobs import Shop, conversations, request


def counted(folder) -> dict[int, int]:
    return token_counts(open_dataset(str(folder), wanted("modelopt")))


def test_supervised_tokens_are_counted_from_the_index(dataset, counts):
    assert counted(dataset) == counts
    assert list(counted(dataset)) == sorted(counts)


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
    for part in ("data", "index", "manifests"):
        shutil.copytree(second / part, first / part, dirs_exist_ok=True)
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
