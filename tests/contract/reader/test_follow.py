"""A job is followed while it is captured: each row once an epoch, whatever is killed or moved meanwhile."""

import errno
import os
import shutil
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.names import FINAL_NORM_PATH
from service.artifacts.dataset_files import LocalFiles
from service.errors import HubUnavailable
from service.reader import Eagle3, QuarryDataset, QuarryStream, ReaderError, published
from tests.support.api import Looks, api_settings, serving, stored
from tests.support.finished_job import JOB, OTHER_NORM, a_request, run_to_publishing
from tests.support.followed import ELSEWHERE, EVERY, ROWS, UNITS, Followed, ids
from tests.support.waiting import wait_until

LAUNCHER = """
import multiprocessing, sys
from service.reader import QuarryStream

def train(url, job, path):
    with open(path, "w", buffering=1) as came:
        for row in QuarryStream.follow(url, job, rank=0, world_size=1):
            print(row.sample_id, file=came)
        print("end", file=came)

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=train, args=sys.argv[1:])
    child.start()
    child.join()
"""


@pytest.mark.parametrize("folder", [None, ELSEWHERE])
def test_a_completed_job_gives_what_its_dataset_gives(followed: Followed, folder: str | None) -> None:
    """In place, and over HTTP from a host that does not have the folder."""
    followed.capture(UNITS)
    followed.complete()
    views = list(followed.follow(view=Eagle3(), folder=folder))
    expected = list(QuarryDataset(followed.dataset, Eagle3()))
    assert len(views) == len(expected) == UNITS * ROWS
    for view, other in zip(views, expected, strict=True):
        assert all(torch.equal(view[name], other[name]) for name in other)


@pytest.mark.parametrize("folder", [None, ELSEWHERE])
def test_rows_come_before_the_job_ends_and_a_view_has_its_norm(
    followed: Followed, folder: str | None
) -> None:
    """1. Followed before the first unit. 2. A unit. 3. Its rows are there. 4. The rest, and the end."""
    rows = iter(followed.follow(view=Eagle3(), folder=folder))
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(lambda: list(islice(rows, ROWS)))
        followed.capture()
        assert len(first.result()) == ROWS
        rest = beside.submit(lambda: list(rows))
        followed.capture(UNITS - 1)
        followed.complete()
        assert len(rest.result()) == (UNITS - 1) * ROWS


@pytest.mark.slow
def test_two_ranks_with_two_workers_each_share_the_rows(followed: Followed) -> None:
    """1. Two loaders follow. 2. Units come. 3. Each row came once; the odd one is left out by `even`."""
    # Threads start these workers: what a thread forks beside others may hold their locks.
    given: dict[str, Any] = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "spawn"}
    loaders = [
        DataLoader(followed.follow(view=Eagle3(), rank=rank, world_size=2), **given) for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as beside:
        coming = [
            beside.submit(lambda loader: [v["input_ids"].tolist() for v in loader], one) for one in loaders
        ]
        followed.capture(UNITS)
        followed.complete()
        shares = [share.result() for share in coming]
    assert [len(share) for share in shares] == [UNITS * ROWS // 2] * 2
    expected = [view["input_ids"].tolist() for view in QuarryDataset(followed.dataset, Eagle3())]
    left_out = expected.pop()
    assert sorted(shares[0] + shares[1]) == sorted(expected)
    assert left_out not in shares[0]


@pytest.mark.parametrize("folder", [None, ELSEWHERE])
def test_rows_without_a_view_come_out_of_a_loaders_worker(followed: Followed, folder: str | None) -> None:
    followed.capture(UNITS)
    followed.complete()
    loader = DataLoader(followed.follow(folder=folder), batch_size=None, num_workers=1, timeout=60)
    rows = list(loader)
    assert ids(rows) == EVERY
    for row, expected in zip(rows, QuarryDataset(followed.dataset), strict=True):
        assert torch.equal(row.read(row.layer_ids), expected.read(row.layer_ids))


def test_shuffled_blocks_hold_every_row_once_and_differ_by_epoch(followed: Followed) -> None:
    followed.capture(UNITS)
    followed.complete()
    stream = followed.follow(window=4, seed=3)
    first = ids(stream)
    assert first == ids(stream) != EVERY
    assert sorted(first[:4]) == EVERY[:4]
    stream.set_epoch(1)
    second = ids(stream)
    assert sorted(first) == sorted(second) == EVERY
    assert first != second


@pytest.mark.slow
def test_workers_that_outlive_an_epoch_begin_the_one_that_was_set(followed: Followed) -> None:
    followed.capture(UNITS)
    followed.complete()
    stream, alone = (followed.follow(view=Eagle3(), window=8) for _ in range(2))
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        alone.set_epoch(epoch)
        seen, expected = ([view["input_ids"].tolist() for view in rows] for rows in (loader, alone))
        assert seen == expected
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.slow
def test_a_trainer_whose_launcher_dies_goes_on(followed: Followed) -> None:
    """1. A process that a launcher spawned follows. 2. The launcher is killed. 3. Every row comes."""
    followed.capture(2)
    followed.dataset.parent.mkdir(exist_ok=True)
    came = followed.dataset.parent / "came"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, followed.url, JOB, str(came)])
    while not came.exists() or not came.read_text():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    followed.capture(UNITS - 2)
    followed.complete()
    while "end" not in came.read_text().split():
        time.sleep(0.05)
    assert came.read_text().split() == [*EVERY, "end"]


def test_with_even_a_row_waits_until_every_rank_has_one(followed: Followed) -> None:
    """Of two ranks the second unit completes the last pair of the first, which has three rows."""
    followed.capture()
    rows = iter(followed.follow(world_size=2))
    assert ids(islice(rows, 1)) == EVERY[:1]
    with ThreadPoolExecutor(1) as beside:
        held = beside.submit(next, rows)
        followed.capture()
        assert held.result().sample_id == EVERY[2]


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_job_that_was_stopped_raises_behind_its_rows(followed: Followed, end: str) -> None:
    followed.capture()
    rows = iter(followed.follow())
    assert ids(islice(rows, ROWS)) == EVERY[:ROWS]
    assert followed.api.post(f"/jobs/{JOB}/cancel").is_success
    if end == "delete":
        assert followed.api.delete(f"/jobs/{JOB}").is_success
    with pytest.raises(ReaderError, match="is cancelled" if end == "cancel" else "no job"):
        next(rows)


def test_a_paused_job_is_waited_for(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    followed.capture()
    rows = iter(followed.follow())
    assert ids(islice(rows, ROWS)) == EVERY[:ROWS]
    assert followed.api.post(f"/jobs/{JOB}/pause").is_success
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(next, rows)
        wait_until(lambda: "is paused; waiting" in caplog.text)
        assert followed.api.post(f"/jobs/{JOB}/resume").is_success
        followed.capture()
        assert coming.result().sample_id == EVERY[ROWS]


def test_a_unit_that_has_not_landed_is_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A worker died between commit and move. 2. Its unit is listed, and asked for again. 3. It lands."""
    followed.capture()
    aside = followed.dataset.rename(followed.dataset.with_name("aside"))
    looks = Looks(monkeypatch)
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(lambda: ids(islice(followed.follow(), ROWS)))
        for _ in range(2):
            assert looks.begun.acquire(timeout=30)
        aside.rename(followed.dataset)
        assert coming.result() == EVERY[:ROWS]


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_file_that_is_still_copied_to_this_host_comes_from_the_service(
    followed: Followed, tmp_path: Path, kind: str
) -> None:
    followed.capture(UNITS)
    followed.complete()
    shutil.copytree(followed.dataset, tmp_path / "copy")
    for file in (tmp_path / "copy" / kind).glob("*/*"):
        os.truncate(file, 1000)
    assert ids(followed.follow(folder=tmp_path / "copy")) == EVERY


def test_the_norm_is_the_services_whatever_the_folder_holds(followed: Followed, tmp_path: Path) -> None:
    """As where the folder of another model's job is named; its states would not fit."""
    followed.capture(UNITS)
    followed.complete()
    (tmp_path / FINAL_NORM_PATH).write_bytes(OTHER_NORM)
    views = followed.follow(view=Eagle3(), folder=tmp_path)
    expected = QuarryDataset(followed.dataset, Eagle3())[0]["target_hidden_states"]
    assert torch.equal(next(iter(views))["target_hidden_states"], expected)


@pytest.mark.slow
def test_a_file_that_is_gone_when_the_job_has_ended_is_named(followed: Followed) -> None:
    followed.capture(UNITS)
    followed.complete()
    shard = next(iter(sorted(followed.dataset.glob("data/*/*"))))
    shard.unlink()
    with pytest.raises(ReaderError, match="no such file"):
        next(iter(followed.follow()))


def test_a_file_that_stays_away_is_named_when_patience_ends(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.capture()
    next(iter(sorted(followed.dataset.glob("data/*/*")))).unlink()
    with pytest.raises(ReaderError, match="no such file"):
        next(iter(followed.follow(patience_s=0.5)))
    assert "waiting for it" in caplog.text


def test_a_folder_is_followed_from_its_publication_on(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Units are committed, and nothing tells the folder. 2. The job is published. 3. A state goes on."""
    monkeypatch.setattr(published, "LOOK_S", 0.01)
    where: dict[str, Any] = {"rank": 0, "world_size": 1}
    rows = QuarryStream.follow(followed.dataset, JOB, **where)  # of which there is no folder yet
    followed.capture(2)
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(lambda: ids(islice(rows, ROWS + 1)))
        followed.capture(UNITS - 2)
        assert not coming.done()
        followed.complete()
        came = coming.result()
    manifest = followed.dataset / "manifests" / f"{JOB}.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:100])  # a copy that has begun
    other = QuarryStream.follow(str(followed.dataset), JOB, **where)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(lambda: next(iter(other)).sample_id)
        time.sleep(0.1)
        assert not first.done()
        manifest.write_bytes(whole)
        assert first.result() == EVERY[0]
    other.load_state_dict(rows.state_dict())
    assert came + ids(other) == EVERY
    with pytest.raises(ReaderError, match="consumers"):
        other.acknowledge("trainer")
    next(iter(sorted(followed.dataset.glob("data/*/*")))).unlink()
    with pytest.raises(ReaderError, match="cannot be opened"):
        next(iter(QuarryStream.follow(followed.dataset, JOB, **where)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm", [lambda whole: whole[:100], lambda whole: whole.replace(b"rows", b"r0ws", 1)]
)
def test_a_manifest_that_stays_faulty_is_named_when_patience_ends(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(published, "LOOK_S", 0.01)
    followed.capture(UNITS)
    followed.complete()
    manifest = followed.dataset / "manifests" / f"{JOB}.json"
    manifest.write_bytes(harm(manifest.read_bytes()))
    with pytest.raises(ReaderError, match=rf"manifests/{JOB}.json"):
        next(iter(QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1, patience_s=0.1)))


def test_a_folder_that_cannot_be_listed_for_a_moment_is_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network share that hiccups."""
    monkeypatch.setattr(published, "LOOK_S", 0.01)
    followed.capture(UNITS)
    followed.complete()
    answers, listed = [False, True, False], LocalFiles.manifests  # to look for it, and to read it

    def manifests(files: LocalFiles) -> list[str]:
        if answers and not answers.pop():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listed(files)

    monkeypatch.setattr(LocalFiles, "manifests", manifests)
    assert ids(QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1)) == EVERY


def test_another_models_norm_is_refused(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "LOOK_S", 0.01)
    followed.capture(UNITS)
    followed.complete()
    file = followed.dataset / "final_norm.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ReaderError, match=r"final_norm[.]safetensors is not that of job"):
        next(iter(QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1, patience_s=0.1)))


def test_a_unit_that_tells_another_norm_than_those_before_it_is_refused(followed: Followed) -> None:
    """While a job is captured no manifest says what its shards hold, and a footer has no checksum."""
    followed.capture(2)
    shard = max(followed.dataset.glob("data/*/*.parquet"))
    told = pq.read_metadata(shard).metadata[b"ARROW:schema"]
    other = b64encode(b64decode(told).replace(b'"eps":1e-6', b'"eps":1e-2'))
    shard.write_bytes(shard.read_bytes().replace(told, other))
    rows = iter(followed.follow(folder=ELSEWHERE))
    assert len(list(islice(rows, ROWS))) == ROWS
    with pytest.raises(ReaderError, match=r"holds other states than its job: .*eps=0\.01"):
        next(rows)


def test_a_hub_that_is_away_is_waited_for_as_long_as_was_said(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.capture(UNITS)
    followed.complete()
    monkeypatch.setattr(published, "LOOK_S", 0.01)
    answers = [True, False, True]  # whether it is away

    def files_of(where: str) -> LocalFiles:
        if answers.pop():
            raise HubUnavailable("the Hub answered 503")
        return LocalFiles(Path(where))

    monkeypatch.setattr(published, "files_of", files_of)
    where: dict[str, Any] = {"rank": 0, "world_size": 1}
    assert ids(QuarryStream.follow(followed.dataset, JOB, **where)) == EVERY
    with pytest.raises(HubUnavailable):
        next(iter(QuarryStream.follow(followed.dataset, JOB, patience_s=0, **where)))


def test_a_service_that_is_away_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    settings = api_settings(tmp_path)
    with stored(settings) as store:
        made = Followed(settings, store, httpx2.Client())
        run_to_publishing(store, made.dataset, JOB, a_request(), num_units=UNITS, rows=ROWS, captured=UNITS)
        made.complete()
        with serving(settings) as api:
            url = str(api.base_url)
            rows = iter(QuarryStream.follow(url, JOB, rank=0, world_size=1, patience_s=60))
            came = ids(islice(rows, ROWS))
        with ThreadPoolExecutor(1) as beside:
            coming = beside.submit(lambda: ids(rows))
            with serving(settings, port=api.base_url.port):
                assert came + coming.result() == EVERY
        with pytest.raises(ReaderError, match=r"127\.0\.0\.1"):
            next(iter(QuarryStream.follow(url, JOB, rank=0, world_size=1, patience_s=0)))


@pytest.mark.parametrize("server", ["", "localhost:8642", "quarry.example.org", "hf://models/acme/states"])
def test_an_address_without_its_scheme_is_not_a_folder_to_wait_for(server: str) -> None:
    with pytest.raises(ReaderError, match=f"'{server}' is no http:// address"):
        QuarryStream.follow(server, JOB, rank=0, world_size=1)


def test_a_key_that_is_refused_raises(followed: Followed) -> None:
    followed.capture()
    with pytest.raises(ReaderError, match="key"):
        next(iter(followed.follow(key="qk_none")))


@pytest.mark.parametrize(("changes", "said"), [({"rank": 2}, "rank 2 of 1"), ({"window": 0}, "window 0")])
def test_impossible_arguments_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ReaderError, match=said):
        QuarryStream.follow("http://127.0.0.1:9", JOB, **({"rank": 0, "world_size": 1} | changes))
