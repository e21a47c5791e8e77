"""Draft vocabularies come from the tokens that the index says are supervised."""

import shutil

import pytest

from service.errors import OptionRefused
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


@pytest.mark.parametrize(
    ("to", "options"),
    [
        *((to, {}) for to in ("eagle", "deepspec", "nemo")),
        *((to, {"algorithm": Algorithm.DFLASH}) for to in ("modelopt", "specforge", "torchspec")),
        ("speculators", {"algorithm": Algorithm.MTP}),
    ],
)
def test_a_drafter_of_the_whole_vocabulary_is_given_no_map(dataset, tmp_path, to, options):
    with pytest.raises(OptionRefused, match="whole vocabulary") as refused:
        export(str(dataset), tmp_path / "out", wanted(to, draft_vocab=9, **options))
    assert refused.value.field == "draft_vocab"
    assert not (tmp_path / "out").exists()
