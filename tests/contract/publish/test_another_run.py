"""One job id, two sets of files: another run is never mixed with what is published, nor put in its place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from schemas.dataset.manifest import Manifest
from schemas.job import JobState
from schemas.names import manifest_path, shard_path
from schemas.request import HubTarget
from service.artifacts.repository import Patience
from service.publish.publisher import publish_folder
from service.settings import Settings
from service.store import Store, jobs, migration, plans
from tests.support.desk import REPO, TOKEN, Desk, committed, etags
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import (
    JOB,
    OWNER,
    a_dataset,
    a_request,
    an_identity,
    run_to_publishing,
)
from tests.support.hub_state import Fault, Token
from tests.support.roles import run_publishing

CHANGED = an_identity(source_fingerprint="9" * 64)
"""The identity of a run of other rows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    [{"num_units": 2, "about": CHANGED}, {"num_units": 2, "rows": 3}, {"num_units": 4}],
    ids=["other rows", "as many rows, in other shards", "more rows"],
)
def test_another_run_of_a_published_job_is_refused_before_a_byte_is_sent(
    desk: Desk, tmp_path: Path, second: dict[str, Any]
) -> None:
    a_dataset(tmp_path / "first", num_units=3, rows=2)
    a_dataset(tmp_path / "second", **second)
    desk.push(tmp_path / "first")
    desk.hub.calls.clear()
    answer = desk.push(tmp_path / "second")
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert answer["detail"] == f"{REPO} holds another run of {JOB}"
    assert "quarry publish DIR" in answer["cure"]
    assert manifest_path(JOB) in answer["cure"]
    assert f"data/{JOB}" in answer["cure"]
    assert (desk.hub.calls["preupload"], desk.hub.calls["commit"]) == (0, 0)
    assert desk.pushed() == etags(tmp_path / "first")


def test_another_run_goes_to_another_repository_as_the_cure_says(desk: Desk, tmp_path: Path) -> None:
    a_dataset(tmp_path / "week2", about=CHANGED)
    desk.push()
    assert "error" in desk.push(tmp_path / "week2")
    assert "error" not in desk.push(tmp_path / "week2", repo_id="org/week2")


def test_other_rows_take_the_place_of_those_whose_manifest_a_person_deleted(
    desk: Desk, tmp_path: Path
) -> None:
    """1. Three units are pushed. 2. Their manifest alone is deleted. 3. Other rows land, and nothing else."""
    a_dataset(tmp_path / "week1", num_units=3)
    a_dataset(tmp_path / "week2", num_units=2, about=CHANGED)
    desk.push(tmp_path / "week1")
    del desk.repo.head.tree[manifest_path(JOB)]
    assert desk.push(tmp_path / "week2")["commit"] == desk.repo.head.oid
    assert desk.pushed() == etags(tmp_path / "week2")


def test_a_manifest_that_says_more_of_the_same_files_is_all_that_is_sent(desk: Desk, tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path / "again")
    checks = manifest.checks.model_copy(update={"logit_rows": manifest.checks.rows_checked})
    told = Manifest.model_validate(manifest.model_dump(exclude={"sha256"}) | {"checks": checks.model_dump()})
    (tmp_path / "again" / manifest_path(JOB)).write_text(told.model_dump_json(indent=1) + "\n")
    desk.push()
    before = desk.repo.head.tree
    desk.push(tmp_path / "again")
    after = desk.repo.head.tree
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {manifest_path(JOB), "README.md", "jobs.json"}


@pytest.mark.slow
def test_a_manifest_of_many_rejects_is_held_against_the_run_in_little_memory(
    desk: Desk, tmp_path: Path
) -> None:
    """All of its values would take more than the memory that a process may take for a repository."""
    many, few = tmp_path / "many", tmp_path / "few"
    a_dataset(many, rejects=100_000)
    a_dataset(few)
    files = [path for path in many.rglob("*") if path.is_file()]
    desk.hub.add_repo(REPO, {path.relative_to(many).as_posix(): path.read_bytes() for path in files})
    settings = Settings(hub_endpoint=desk.hub.url, hub_token=TOKEN, plan_memory_bytes=2**26)
    publish_folder(few, HubTarget(repo_id=REPO, private=False), settings)
    assert desk.pushed() == etags(few)


@pytest.mark.parametrize("is_published", [False, True])
def test_a_manifest_that_contradicts_its_own_digest_is_not_pushed(
    desk: Desk, tmp_path: Path, is_published: bool
) -> None:
    """Every reader refuses such a manifest: it must not take the place of a right one either."""
    if is_published:
        desk.push()
    before = desk.pushed() if is_published else {}
    shutil.copytree(desk.dataset, tmp_path / "changed")
    manifest = tmp_path / "changed" / manifest_path(JOB)
    body = json.loads(manifest.read_text())
    body["rejects"] = []
    manifest.write_text(json.dumps(body, indent=1))
    answer = desk.push(tmp_path / "changed")
    assert answer["error"] == "DatasetBroken"
    assert answer["detail"].startswith(f"{manifest_path(JOB)} was changed after it was made: its sha256 is")
    assert (desk.pushed() if is_published else {}) == before
    assert is_published or not desk.hub.calls["commit"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 222 files besides manifest, card and table of jobs: two commits, and a last one."""
    folder = tmp_path_factory.mktemp("many")
    a_dataset(folder, num_units=110, rows=1)
    return folder


def test_what_a_push_that_never_landed_left_is_gone_when_another_has(desk: Desk, many: Path) -> None:
    """1. A push of many files dies before its manifest. 2. Fewer files land, and only they."""
    desk.hub.fail("commit", Fault(status=503, nth=3, times=10_000))
    assert desk.push(many)["error"] == "HubUnavailable"
    assert shard_path(JOB, 9) in desk.pushed()
    desk.hub.heal()
    assert desk.push()["commit"] == desk.repo.head.oid
    assert desk.titles() == [f"Add files of {JOB}"] * 2 + [f"Add {JOB}"]
    assert desk.pushed() == etags(desk.dataset)


def test_another_run_published_in_the_middle_of_a_push_ends_it(
    desk: Desk, many: Path, tmp_path: Path
) -> None:
    """1. The first of three commits stands. 2. Another service publishes another run. 3. It stays alone."""
    a_dataset(tmp_path / "week2", num_units=110, rows=1, about=CHANGED)

    def publish() -> None:
        desk.repo.add("another's", committed(tmp_path / "week2"))

    desk.hub.meanwhile("commit", lambda: desk.hub.meanwhile("paths_info", publish))
    answer = desk.push(many)
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert desk.titles() == [f"Add files of {JOB}", "another's"]
    assert desk.pushed() == etags(tmp_path / "week2")


def test_another_run_published_just_before_a_commit_of_files_is_left_as_it_is(
    desk: Desk, many: Path, tmp_path: Path
) -> None:
    """1. A push has looked, and sent its first files. 2. Another run lands. 3. Nothing is committed."""
    a_dataset(tmp_path / "week2", num_units=110, rows=1, about=CHANGED)
    desk.hub.meanwhile("commit", lambda: desk.repo.add("another's", committed(tmp_path / "week2")))
    answer = desk.push(many)
    assert desk.pushed() == etags(tmp_path / "week2")
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert desk.titles() == ["another's"]


def test_files_that_another_run_overwrote_before_it_landed_are_as_the_manifest_says(
    desk: Desk, many: Path, tmp_path: Path
) -> None:
    """1. Our first commit stands. 2. Another run overwrites a shard of it. 3. Our last commit mends it."""
    a_dataset(tmp_path / "week2", num_units=1, rows=1, about=CHANGED)
    path = shard_path(JOB, 0)

    def overwrite() -> None:
        desk.repo.add("another's", {path: committed(tmp_path / "week2")[path]})

    desk.hub.meanwhile("commit", lambda: desk.hub.meanwhile("preupload", overwrite))
    assert desk.push(many)["commit"] == desk.repo.head.oid
    assert "another's" in desk.titles()
    assert desk.pushed() == etags(many)


@pytest.mark.slow
def test_a_job_of_which_another_run_is_published_fails_once_keeps_its_dataset_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The job fails, naming field and cure. 2. It is not tried again. 3. The cure followed, it lands."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    a_dataset(tmp_path / "week1", num_units=3, about=CHANGED)
    with FakeHub(cas=tmp_path / "cas") as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        repo = hub.add_repo(REPO, private=True)
        repo.add("week 1", committed(tmp_path / "week1"))
        settings = Settings(data_dir=tmp_path / "data", hub_endpoint=hub.url, hub_token=TOKEN)
        settings.data_dir.mkdir()
        store = Store(settings.database())
        store.write(migration.migrate)
        folder = settings.dataset_dir(JOB)

        def publish() -> bool:
            patience = Patience(attempts=3, sleep=lambda _: None)
            return run_publishing(store, settings, OWNER, lambda: False, patience=patience)

        run_to_publishing(store, folder, JOB, a_request(HubTarget(repo_id=REPO)))
        assert publish()
        job = store.read(jobs.job, JOB)
        assert job.state is JobState.FAILED
        assert job.problem is not None
        assert (job.problem.type, job.problem.field) == ("urn:quarry:option-refused", "hub.repo_id")
        assert not publish()
        assert (folder / manifest_path(JOB)).is_file()
        assert repo.head.title == "week 1"

        repo.add("the cure", {})
        for path in [path for path in repo.head.tree if JOB in path]:
            del repo.head.tree[path]
        store.write(jobs.resume, JOB)
        assert plans.lease(store, OWNER, 60.0) is None
        assert publish()
        assert store.read(jobs.state, JOB) is JobState.COMPLETED
        assert {path for path in repo.head.tree if JOB in path} == {p for p in etags(folder) if JOB in p}
        store.close()
