"""Draft vocabularies come from the tokens that the index says are supervised."""

import shutil

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
