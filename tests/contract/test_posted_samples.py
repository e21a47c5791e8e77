"""Samples that are posted to a schedule wait on disk for its next job, and are written once."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule
from schemas.source import Sample
from service.control import scheduling
from service.control.request_body import CheckedRequest, CheckedSamples
from service.control.submit import submit
from service.errors import Conflict, NotFound, SourceRefused, WriteFailed
from service.store import schedules
from tests.support.nights import NAME, Nights, names, row
from tests.support.roles import sweep


@pytest.fixture
def nights(tmp_path: Path, target: Path) -> Nights:
    url = f"sqlite:///{tmp_path / 'quarry.db'}"
    return Nights.open(tmp_path, target, url, request={"source": {"kind": "posted"}})


def test_posted_samples_are_written_once_and_then_removed(nights: Nights) -> None:
    """1. Two posts, one of them twice. 2. A night. 3. The same ones again, and others. 4. Another night."""
    nights.post(0, 1, 2)
    nights.post(3)
    nights.post(3)
    assert len(nights.waiting()) == 2
    nights.night()
    assert nights.once() == names(range(4))
    sweep(nights.store, nights.shop.settings)
    assert nights.waiting() == []
    nights.post(2, 3, 4)
    nights.night()
    assert nights.once() == names(range(5))


def test_the_data_folder_may_be_a_relative_path(
    nights: Nights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = nights.shop.settings.data_dir.relative_to(tmp_path)
    nights.shop.settings = nights.shop.settings.model_copy(update={"data_dir": relative})
    nights.post(0)
    nights.night()
    assert nights.once() == names([0])


def test_samples_keep_what_they_hold(nights: Nights) -> None:
    told: list[dict[str, Any]] = [
        {"id": "s100", "text": "a text"},
        {"id": "s101", "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {**row(7), "tools": [{"name": "search"}]},
    ]
    samples = [Sample.model_validate(one) for one in told]
    scheduling.post_samples(nights.store, nights.shop.settings, nights.number(), CheckedSamples.of(samples))
    (file,) = nights.waiting()
    assert [json.loads(line) for line in file.read_text().splitlines()] == told
    nights.night()
    assert nights.job().progress.samples_rejected == 0
    assert nights.once() == names([7, 100, 101])


def test_only_a_schedule_of_that_kind_takes_posts_and_no_other_request_reads_them(nights: Nights) -> None:
    settings = nights.shop.settings
    request = ExtractRequest.model_validate({"model": str(nights.target), "source": {"kind": "posted"}})
    with pytest.raises(SourceRefused, match="posted to a schedule"):
        submit(CheckedRequest.of(request), "key", nights.store, settings)
    with pytest.raises(NotFound, match="deleted"):
        scheduling.post_samples(nights.store, settings, nights.number() + 1, CheckedSamples.of([]))
    folder = {"kind": "file", "path": str(nights.folder)}
    other = {"name": "other", "cron": "0 3 * * *", "request": {"model": str(nights.target), "source": folder}}
    scheduling.add(nights.store, settings, NewSchedule.model_validate(other))
    number, _ = nights.store.read(schedules.numbered, "other")
    with pytest.raises(Conflict, match="read a file source"):
        scheduling.post_samples(nights.store, settings, number, CheckedSamples.of([Sample(text="x")]))


def test_a_deleted_schedules_posts_go_with_it(nights: Nights) -> None:
    nights.post(0)
    (file,) = nights.waiting()
    scheduling.remove(nights.store, nights.shop.settings, NAME)
    assert not file.parent.exists()


def test_posts_that_cannot_be_removed_concern_their_schedule_alone(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Those of two schedules cannot be removed. 2. Those of a third are. 3. A sweep removes the rest."""
    store, settings, remove = nights.store, nights.shop.settings, shutil.rmtree
    kept: list[Path] = []

    def refusing(folder: Path) -> None:
        if folder in kept:
            raise PermissionError(errno.EACCES, "no right", str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    for number in range(3):
        if number:
            nights.add()
        nights.post(number)
        (file,) = nights.waiting()
        if number < 2:
            kept.append(file.parent)
            with pytest.raises(WriteFailed, match=str(file.parent)):
                scheduling.remove(store, settings, NAME)
        else:
            scheduling.remove(store, settings, NAME)
        assert file.parent.exists() == (number < 2)
    for left in 1, 0:
        del kept[left]
        sweep(store, settings)
        assert len(list(settings.spool_root.iterdir())) == left


@pytest.mark.parametrize("samples", ["new", "all"])
def test_a_night_without_posts_is_complete_and_writes_nothing(nights: Nights, samples: str) -> None:
    nights.change(samples=samples)
    nights.night()
    job = nights.job()
    assert (job.state, job.progress.samples_planned) == (JobState.COMPLETED, 0)
    assert nights.run().detail == "no new samples"
