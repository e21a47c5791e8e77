"""A dataset that is deleted stays so, whoever still writes into it, and a deletion that died is ended."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import update

from service.control import deletion
from service.control.deletion import delete_job
from service.errors import NotFound
from service.publish import assemble, publisher
from service.store import jobs
from service.store.tables import TASK
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import delete_old, run_publishing, sweep


@contextmanager
def publisher_inside(shop: Shop, monkeypatch: pytest.MonkeyPatch, step: str) -> Iterator[None]:
    """Hold up a publisher before a step of `assemble` while the block runs, and let it go on and end then."""
    inside, go_on, real = threading.Event(), threading.Event(), getattr(assemble, step)

    def held_up(*given: object) -> object:
        inside.set()
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(assemble, step, held_up)
    late = threading.Thread(
        target=run_publishing, args=(shop.store, shop.settings, "publisher", lambda: False)
    )
    late.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        go_on.set()
        late.join()


def captured(shop: Shop, target: Path) -> str:
    job_id = shop.submit(request(target, conversations(6)))
    shop.plan()
    shop.capture(job_id)
    return job_id


@pytest.mark.parametrize("step", ["write_token_freq", "write_final_norm", "_remove_unnamed", "_write_card"])
def test_a_publisher_that_writes_late_makes_no_deleted_dataset_anew(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    job_id = captured(shop, target)
    dataset = shop.settings.dataset_dir(job_id)
    with publisher_inside(shop, monkeypatch, step):
        shop.store.write(jobs.cancel, job_id)
        delete_job(shop.store, shop.settings, job_id, with_dataset=True)
        assert list(dataset.parent.iterdir()) == []
    sweep(shop.store, shop.settings)
    assert list(dataset.parent.iterdir()) == [] and not (shop.settings.work_root / job_id).exists()


def test_a_deletion_whose_process_died_over_the_hidden_folder_is_ended(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. It dies before a file is removed. 2. Its name is there again. 3. The task ends it."""
    job_id = captured(shop, target)
    dataset = shop.settings.dataset_dir(job_id)

    class Killed(BaseException):
        """As SIGKILL, nothing handles it."""

    def die(folder: Path) -> None:
        if folder.exists():
            raise Killed

    shop.store.write(jobs.cancel, job_id)
    with monkeypatch.context() as dying, pytest.raises(Killed):
        dying.setattr(deletion, "remove_folder", die)
        delete_job(shop.store, shop.settings, job_id, with_dataset=True)
    dataset.mkdir()
    (dataset / "file").touch()
    with shop.store.writing() as tx:
        tx.connection.execute(update(TASK).values(not_before=None))
    delete_old(shop.store, shop.settings)
    assert list(dataset.parent.iterdir()) == []
    with pytest.raises(NotFound):
        shop.store.read(jobs.job, job_id)


def test_a_publisher_whose_job_is_deleted_before_it_writes_leaves_no_folder(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Nothing lands. 2. The job is deleted. 3. Only then the publisher comes to the dataset's folder."""
    job_id = captured(shop, target)
    dataset = shop.settings.dataset_dir(job_id)
    real = publisher.account_of

    def deleted_meanwhile(*given: object) -> object:
        account = real(*given)
        shop.store.write(jobs.cancel, job_id)
        delete_job(shop.store, shop.settings, job_id, with_dataset=True)
        return account

    monkeypatch.setattr(publisher, "account_of", deleted_meanwhile)
    assert run_publishing(shop.store, shop.settings, "publisher", lambda: False)
    assert list(dataset.parent.iterdir()) == []
