"""Datasets that an earlier version wrote: reader, `quarry verify` and `quarry export` give what they gave."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from schemas.job import JobState
from schemas.names import manifest_path, shard_path
from service.reader import QuarryDataset
from tests.frozen.values import (
    DATASETS,
    HERE,
    NAMES,
    computed,
    differences,
    exact,
    export,
    exports_of,
    quarry,
    read,
    verify,
)
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop, request


@pytest.fixture(autouse=True)
def beside_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets name their model `./target`."""
    monkeypatch.chdir(HERE)


@cache
def values(name: str) -> Any:
    return json.loads((DATASETS / f"{name}.json").read_text())


def test_every_dataset_has_its_values() -> None:
    assert {path.name for path in DATASETS.iterdir() if path.is_dir()} == set(NAMES)
    assert {path.stem for path in DATASETS.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_gives_what_it_gave(name: str) -> None:
    assert differences(values(name)["read"], read(DATASETS / name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_verify_says_what_it_said(name: str) -> None:
    report = verify(DATASETS / name)
    assert report["exit"] == 0
    assert differences(values(name)["verify"], report) == []


@pytest.mark.parametrize(("name", "to"), [(name, to) for name in NAMES for to in exports_of(name)])
def test_an_export_holds_what_it_held(name: str, to: str, tmp_path: Path) -> None:
    assert differences(values(name)["exports"][to], export(to, DATASETS / name, tmp_path / "out")) == []


@pytest.mark.slow
def test_verify_still_finds_a_flipped_byte_in_an_old_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(DATASETS / "plain", folder)
    shard = min(folder.glob("data/*/*.parquet"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    code, said = quarry("verify", str(folder), "--json")
    assert code == 1
    assert shard.relative_to(folder).as_posix() in {
        finding["path"] for finding in json.loads(said)["findings"]
    }


def test_two_jobs_of_one_repository_are_two_and_one(tmp_path: Path) -> None:
    """The card's default configuration is the index of both, by the public library."""
    jobs = values("repository")["read"]["jobs"]
    assert len(jobs) == 2 and sum(jobs.values()) == values("repository")["read"]["about"]["rows"]
    index = datasets.load_dataset(str(DATASETS / "repository"), split="train", cache_dir=str(tmp_path))
    assert index["sample_id"][:] == values("repository")["read"]["about"]["sample_ids"]
    assert {shard.split("/")[1] for shard in index["shard"]} == set(jobs)
    for job in jobs:
        assert (DATASETS / "repository" / manifest_path(job)).is_file()
        assert (DATASETS / "repository" / shard_path(job, 0)).is_file()


@pytest.mark.slow
def test_another_job_joins_a_repository_that_an_earlier_version_began(tmp_path: Path, hub: FakeHub) -> None:
    """What is there stays as it is but for the card and the table of jobs; a reader finds all rows."""
    old = DATASETS / "repository"
    tree = {path.relative_to(old).as_posix(): path.read_bytes() for path in old.rglob("*") if path.is_file()}
    before = hub.add_repo(REPO, tree, private=True).head.tree
    shop = Shop.open(tmp_path, HERE / "target", hub_endpoint=hub.url, hub_token=TOKEN)
    samples = [{"id": "third", "text": "A sample of a third job."}]
    body = request(HERE, samples, model="./target", layers=[1, 2, 3], max_tokens=200, hub={"repo_id": REPO})
    job = shop.run(body, "third")
    shop.store.close()
    assert job.state is JobState.COMPLETED, job.problem
    after = hub.repo(REPO).head.tree
    assert {path for path in before if after[path].etag != before[path].etag} <= {"README.md", "jobs.json"}
    new = shop.settings.dataset_dir(job.id)
    files = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    written = {path for path in files if job.id in path}
    assert written == {path for path in after if job.id in path}
    assert len(written) == len(("shard", "index", "manifest", "token counts"))
    together = tmp_path / "together"
    shutil.copytree(new, together)
    shutil.copytree(old, together, dirs_exist_ok=True)
    assert len(QuarryDataset(together)) == values("repository")["read"]["about"]["rows"] + 1
    assert quarry("verify", str(together))[0] == 0


def test_all_that_is_frozen_is_small() -> None:
    files = [path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    blocks = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    assert blocks < 3_000_000, f"{blocks} bytes, in blocks of 4 KiB"


# The comparison itself.


def test_computed_values_may_be_a_rounding_off_and_no_more() -> None:
    draws = torch.Generator().manual_seed(0)
    states, shifts = (torch.randn((5, 64), generator=draws).bfloat16() for _ in range(2))
    rounded = (states.float() * (1 + 2**-8 * shifts.sign())).bfloat16()
    assert differences(computed(states), computed(rounded)) == []
    for wrong in (states * 1.05, states.roll(1, 0), states.roll(1, 1), states.float(), states[:-1]):
        assert differences(computed(states), computed(wrong)) != []
    assert differences(exact(states), exact(rounded)) != []


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1], [1, 2]),
        ([1, 2], [2, 1]),
        ("a", "b"),
        (1.0, 1.0000001),
        ("int64[2] = 00", "int32[2] = 00"),
        ({"a": [{"b": None}]}, {"a": [{"b": 0}]}),
    ],
)
def test_what_is_not_as_it_was_is_found(frozen: Any, found: Any) -> None:
    assert differences(frozen, frozen) == []
    assert differences(frozen, found) != []
