"""What a repository may hold: several jobs, a person's card, many commits; and what is never pushed."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.dataset.jobs_table import JobsTable
from schemas.dataset.manifest import Manifest
from schemas.names import JOBS_PATH, job_id_from_content, manifest_path
from service.publish.card import assigned_configs
from tests.support.desk import REPO, TOKEN, Desk, committed, etags
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import (
    FINAL_NORM,
    JOB,
    OTHER_JOB,
    OTHER_NORM,
    a_dataset,
    an_identity,
)
from tests.support.hub_client import HubClient
from tests.support.hub_state import Fault, Repo, Token, large_blob, regular_blob
from tests.support.hub_storage import XetStorage


def test_a_public_repository_is_refused_where_a_private_one_was_asked_for(desk: Desk) -> None:
    desk.hub.add_repo(REPO, private=False)
    answer = desk.push()
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.private")
    assert desk.push(private=False)["commit"] == desk.repo.head.oid


@pytest.mark.parametrize("pattern", ["data/", "*.json"])
def test_a_repository_that_ignores_a_file_of_the_dataset_is_refused(desk: Desk, pattern: str) -> None:
    """The Hub's client leaves what .gitignore names out of a commit, and only logs that."""
    desk.hub.add_repo(REPO, {".gitignore": f"*.tmp\n{pattern}\n".encode()}, private=True)
    answer = desk.push()
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert ".gitignore" in answer["detail"]
    assert desk.titles() == []
    desk.repo.add("mended", {".gitignore": regular_blob(b"*.tmp\n")})
    assert desk.push()["commit"] == desk.repo.head.oid
    assert etags(desk.dataset).items() <= desk.pushed().items()


@pytest.mark.slow
def test_two_jobs_share_a_repository_and_the_card_lists_both(desk: Desk, tmp_path: Path) -> None:
    desk.push()
    desk.push(desk.other)
    assert desk.titles() == [f"Add {JOB}", f"Add {OTHER_JOB}"]
    both = etags(desk.dataset) | etags(desk.other)
    assert desk.pushed().keys() == both.keys()
    assert {path for path, etag in desk.pushed().items() if etag != both[path]} == {"README.md", "jobs.json"}
    desk.hub.know_xet(desk.dataset)
    desk.hub.know_xet(desk.other)
    with HubClient(desk.mode, tmp_path / "home", desk.hub.url) as reader:
        rows = reader.ask("load", repo_id=REPO, token=TOKEN, config="states", streaming=False)["rows"]
    assert {row["sample_id"][:18] for row in rows} == {JOB, OTHER_JOB}
    assert len(rows) == 12


def test_a_job_pushed_by_another_in_between_is_merged_into_the_card(desk: Desk) -> None:
    """1. We read the branch. 2. Another job lands. 3. Our commit is stale. 4. We merge and commit."""
    desk.hub.meanwhile("commit", lambda: desk.repo.add("another's", committed(desk.other)))
    assert desk.push()["commit"] == desk.repo.head.oid
    assert desk.titles() == ["another's", f"Add {JOB}"]
    assert set(assigned_configs(card_of(desk.repo))) == {JOB, OTHER_JOB}
    table = JobsTable.model_validate_json(desk.repo.head.tree[JOBS_PATH].content or b"")
    assert {job.job_id for job in table.jobs} == {JOB, OTHER_JOB}


@pytest.mark.slow
def test_jobs_pushed_at_once_take_turns_and_the_card_lists_each(desk: Desk, tmp_path: Path) -> None:
    """As the parts of a source, each from a machine of its own; a storage in a folder serves one process."""
    jobs = [job_id_from_content(f"machine {number}") for number in range(4)]
    for job_id in jobs:
        a_dataset(tmp_path / job_id, job_id)
    hub = {"repo_id": REPO}
    with ExitStack() as running, ThreadPoolExecutor() as machines:
        cas = XetStorage() if desk.mode == "xet" else None
        desk = replace(desk, hub=running.enter_context(FakeHub(cas=cas)))
        desk.hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        clients = [
            running.enter_context(HubClient(desk.mode, tmp_path / f"home {job_id}")) for job_id in jobs
        ]

        def push(client: HubClient, job_id: str) -> dict[str, Any]:
            folder = str(tmp_path / job_id)
            where = {"folder": folder, "endpoint": desk.hub.url, "token": TOKEN, "hub": hub}
            return client.ask("push", **where, first_wait_s=0.1)

        answers = list(machines.map(push, clients, jobs))
    assert [answer.get("detail") for answer in answers] == [None] * 4
    assert sorted(desk.titles()) == sorted(f"Add {job_id}" for job_id in jobs)
    assert assigned_configs(card_of(desk.repo)).keys() == set(jobs)
    table = JobsTable.model_validate_json(desk.repo.head.tree[JOBS_PATH].content or b"")
    assert {job.job_id for job in table.jobs} == set(jobs)


def card_of(repo: Repo) -> str:
    content = repo.head.tree["README.md"].content
    assert content is not None
    return content.decode()


def test_what_a_person_wrote_into_the_card_is_kept(desk: Desk) -> None:
    card = b"---\nlicense: mit\nlanguage:\n- en\n---\n\nRead this first.\n"
    desk.hub.add_repo(REPO, {"README.md": card}, private=True)
    desk.push()
    card_now = card_of(desk.repo)
    assert "license: mit" in card_now
    assert "Read this first." in card_now
    assert JOB in card_now


def test_a_card_that_the_hub_lists_and_does_not_find_is_asked_for_again(desk: Desk) -> None:
    """It was taken for none, and what a person wrote into it was gone."""
    desk.hub.add_repo(REPO, {"README.md": b"Read this first.\n"}, private=True)
    desk.hub.fail("resolve", Fault(status=404, headers={"X-Error-Code": "EntryNotFound"}))
    assert len(desk.push()["waits"]) == 1
    assert "Read this first." in card_of(desk.repo)


def test_states_of_another_model_are_refused_before_a_byte_is_sent(desk: Desk, tmp_path: Path) -> None:
    desk.push()
    a_dataset(tmp_path / "other", OTHER_JOB, final_norm=OTHER_NORM)
    desk.hub.calls.clear()
    answer = desk.push(tmp_path / "other")
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert answer["cure"]
    assert desk.hub.calls["preupload"] == 0
    assert len(desk.repo.commits) == 2


def test_other_layers_need_a_configuration_of_their_own(desk: Desk, tmp_path: Path) -> None:
    desk.push()
    a_dataset(tmp_path / "other", OTHER_JOB, final_norm=FINAL_NORM, about=an_identity(layer_ids=(1, 4)))
    answer = desk.push(tmp_path / "other")
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.config_name")
    assert desk.push(tmp_path / "other", config_name="early")["commit"] == desk.repo.head.oid
    assert assigned_configs(card_of(desk.repo)) == {JOB: "states", OTHER_JOB: "early"}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 122 files besides manifest, card and table of jobs."""
    folder = tmp_path_factory.mktemp("many")
    a_dataset(folder, num_units=60, rows=1)
    return folder


def test_many_files_take_several_commits_and_the_manifest_comes_with_the_last(desk: Desk, many: Path) -> None:
    desk.push(many)
    assert desk.titles() == [f"Add files of {JOB}", f"Add {JOB}"]
    start, half, whole = desk.repo.commits
    added = [len(half.tree) - len(start.tree), len(whole.tree) - len(half.tree)]
    assert added == [25, 100]
    assert manifest_path(JOB) not in half.tree
    assert "README.md" not in half.tree
    assert desk.pushed() == etags(many)
    assert sum(desk.hub.calls[e] for e in ("info", "tree", "paths_info", "preupload", "commit")) < 45


@pytest.mark.slow
def test_a_push_that_broke_between_two_commits_continues_with_the_second(desk: Desk, many: Path) -> None:
    desk.hub.fail("commit", Fault(status=503, nth=2, times=10_000))
    assert desk.push(many)["error"] == "HubUnavailable"
    assert desk.titles() == [f"Add files of {JOB}"]
    desk.hub.heal()
    desk.hub.calls.clear()
    assert desk.push(many)["commit"] == desk.repo.head.oid
    assert desk.titles() == [f"Add files of {JOB}", f"Add {JOB}"]
    assert desk.hub.calls["commit"] == 1


def test_a_folder_of_two_jobs_is_pushed_job_by_job(desk: Desk, tmp_path: Path) -> None:
    a_dataset(tmp_path / "both")
    a_dataset(tmp_path / "both", OTHER_JOB)
    answer = desk.push(tmp_path / "both")
    assert answer["commit"] == desk.repo.head.oid
    assert sorted(desk.titles()) == sorted([f"Add {JOB}", f"Add {OTHER_JOB}"])
    assert desk.pushed() == etags(tmp_path / "both")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)


def cut_off_a_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "detail", "uploads"),
    [
        (flip_a_bit, "no longer has the bytes that were sealed", 1),
        (cut_off_a_byte, "bytes long", 0),
        (Path.unlink, "is missing", 0),
    ],
)
def test_a_shard_that_changed_after_sealing_is_never_committed(
    desk: Desk, tmp_path: Path, harm: Callable[[Path], None], detail: str, uploads: int
) -> None:
    folder = tmp_path / "rotten"
    shutil.copytree(desk.dataset, folder)
    shard = next((folder / "data").rglob("*.parquet"))
    harm(shard)
    answer = desk.push(folder)
    assert answer["error"] == "DatasetBroken"
    assert shard.name in answer["detail"]
    assert detail in answer["detail"]
    assert desk.hub.calls["preupload"] == uploads
    assert desk.titles() == []


@pytest.mark.parametrize("path", ["/etc/hostname", "data/../../secret.parquet", "notes.txt"])
def test_a_manifest_that_names_a_stranger_is_refused(desk: Desk, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(desk.dataset, folder)
    file = folder / manifest_path(JOB)
    manifest = Manifest.model_validate_json(file.read_bytes())
    stranger = manifest.extras[0].model_copy(update={"path": path})
    forged = manifest.model_copy(update={"extras": (*manifest.extras, stranger)})
    file.write_text(forged.model_dump_json())
    answer = desk.push(folder)
    assert answer["error"] == "DatasetBroken"
    assert desk.hub.calls["create"] == 0


def test_a_manifest_without_the_final_norm_is_refused(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(desk.dataset, folder)
    file = folder / manifest_path(JOB)
    manifest = Manifest.model_validate_json(file.read_bytes())
    file.write_text(manifest.model_copy(update={"extras": ()}).model_dump_json())
    assert desk.push(folder)["error"] == "DatasetBroken"
    assert not desk.hub.calls


def test_a_manifest_that_stands_under_another_jobs_name_is_refused(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "renamed"
    shutil.copytree(desk.dataset, folder)
    (folder / manifest_path(JOB)).rename(folder / manifest_path(OTHER_JOB))
    answer = desk.push(folder)
    told = f"its file name is {manifest_path(OTHER_JOB)!r}, expected {manifest_path(JOB)!r}"
    assert told in answer["detail"]
    assert not desk.hub.calls


def test_a_folder_without_a_manifest_is_refused(desk: Desk, tmp_path: Path) -> None:
    assert desk.push(tmp_path)["error"] == "DatasetBroken"
    assert not desk.hub.calls


def test_a_remote_file_that_is_not_what_was_sealed_ends_as_unavailable(desk: Desk) -> None:
    """1. Our commit lands. 2. Somebody overwrites a shard before it is read back."""
    path = next(p for p in etags(desk.dataset) if p.startswith("data/"))
    desk.push()
    desk.repo.add("vandal", {path: large_blob("0" * 64, 1, b"x")})

    def again() -> None:
        desk.repo.commits[-1].tree[path] = large_blob("0" * 64, 1, b"x")

    desk.hub.meanwhile("commit", lambda: desk.hub.meanwhile("paths_info", again))
    answer = desk.push()
    assert answer["error"] == "HubUnavailable"
    assert path in answer["detail"]
