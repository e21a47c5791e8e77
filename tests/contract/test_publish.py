"""Pushing finished jobs to a Hub, with the real client in LFS and xet mode, whatever goes wrong."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.manifest import Manifest
from schemas.names import manifest_path
from service.publish.card import assigned_configs
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import (
    FINAL_NORM,
    JOB,
    OTHER_JOB,
    OTHER_NORM,
    a_dataset,
    an_identity,
    layer_bytes,
)
from tests.support.hub_client import HubClient, Mode
from tests.support.hub_state import Fault, Repo, Token, large_blob, regular_blob

REPO = "org/states"
TOKEN = "hf_may_write"
READ_TOKEN = "hf_may_read"

ENDPOINTS = [
    "info",
    "auth_check",
    "tree",
    "paths_info",
    "resolve",
    "create",
    "preupload",
    "validate",
    "commit",
]
MODE_ENDPOINTS = {"lfs": ["lfs_batch", "lfs_put", "lfs_verify"], "xet": ["xet_write_token"]}

FAULTS = {
    "429": Fault(status=429, headers={"Retry-After": "0"}),
    "500": Fault(status=500),
    "503": Fault(status=503),
    "409": Fault(status=409),
    "412": Fault(status=412),
    "drop before": Fault(drop="before"),
    "drop after": Fault(drop="after"),
}


@dataclass(frozen=True)
class Desk:
    """A Hub, the client process that talks to it, and the folders of two finished jobs of one model."""

    hub: FakeHub
    client: HubClient
    mode: Mode
    dataset: Path
    other: Path

    def push(self, folder: Path | None = None, token: str = TOKEN, **hub: Any) -> dict[str, Any]:
        target = {"repo_id": REPO} | hub
        return self.client.ask(
            "push", folder=str(folder or self.dataset), endpoint=self.hub.url, token=token, hub=target
        )

    @property
    def repo(self) -> Repo:
        return self.hub.repo(REPO)

    def titles(self) -> list[str]:
        return [commit.title for commit in self.repo.commits[1:]]

    def pushed(self) -> dict[str, str]:
        """Return the etag of every file that was pushed: the sha256 of large ones, the blob id of others."""
        return {path: blob.etag for path, blob in self.repo.head.tree.items() if path != ".gitattributes"}


@pytest.fixture(scope="module", params=["lfs", "xet"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture(scope="module")
def client(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    with HubClient(mode, tmp_path_factory.mktemp("home")) as client:
        yield client


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    a_dataset(first)
    a_dataset(second, OTHER_JOB)
    return first, second


@pytest.fixture(scope="module")
def hub(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub(cas=tmp_path_factory.mktemp("cas") if mode == "xet" else None) as hub:
        yield hub


@pytest.fixture
def desk(hub: FakeHub, mode: Mode, client: HubClient, folders: tuple[Path, Path]) -> Desk:
    hub.forget()
    hub.tokens.clear()
    hub.calls.clear()
    hub.seen_authorizations.clear()
    hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
    hub.add_token(READ_TOKEN, Token("me", role="read", orgs={"org": "write"}))
    return Desk(hub, client, mode, *folders)


def etags(folder: Path) -> dict[str, str]:
    """Return what `Desk.pushed` should say of a folder."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            large = file.suffix in (".parquet", ".safetensors")
            digest = hashlib.sha256(content).hexdigest()
            blob = large_blob(digest, len(content), None) if large else regular_blob(content)
            found[file.relative_to(folder).as_posix()] = blob.etag
    return found


def test_a_job_becomes_one_commit_that_holds_exactly_its_folder(desk: Desk) -> None:
    answer = desk.push()
    assert answer["commit"] == desk.repo.head.oid
    assert desk.titles() == [f"Add {JOB}"]
    assert desk.pushed() == etags(desk.dataset)
    assert desk.repo.private


def test_pushing_again_makes_no_commit_and_uploads_nothing(desk: Desk) -> None:
    first = desk.push()
    desk.hub.calls.clear()
    assert desk.push() == first
    assert len(desk.repo.commits) == 2
    uploads = {"preupload", "commit", *MODE_ENDPOINTS[desk.mode]}
    assert not uploads & set(desk.hub.calls)


def test_the_folder_downloaded_with_the_real_client_is_the_folder_that_was_pushed(
    desk: Desk, tmp_path: Path
) -> None:
    desk.push()
    desk.hub.know_xet(desk.dataset)
    with HubClient(desk.mode, tmp_path / "home", desk.hub.url) as reader:
        reader.ask("download", repo_id=REPO, token=TOKEN, folder=str(tmp_path / "copy"))
    assert desk.hub.calls["xet_read_token"] == (1 if desk.mode == "xet" else 0)
    for path in etags(desk.dataset):
        assert (tmp_path / "copy" / path).read_bytes() == (desk.dataset / path).read_bytes()


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_the_light_index_by_default_and_the_states_by_name(
    desk: Desk, tmp_path: Path, streaming: bool
) -> None:
    desk.push()
    desk.hub.know_xet(desk.dataset)
    with HubClient(desk.mode, tmp_path / "home", desk.hub.url) as reader:
        light = reader.ask("load", repo_id=REPO, token=TOKEN, config=None, streaming=streaming)["rows"]
        states = reader.ask("load", repo_id=REPO, token=TOKEN, config="states", streaming=streaming)["rows"]
    assert [row["sample_id"] for row in light] == [row["sample_id"] for row in states]
    assert "layer_4" not in light[0]
    assert states[4]["layer_4"] == layer_bytes(1, 1, 4).hex()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_endpoint_ends_in_the_same_tree_and_one_commit(desk: Desk, fault: str) -> None:
    for endpoint in ENDPOINTS + MODE_ENDPOINTS[desk.mode]:
        desk.hub.forget()
        desk.hub.fail(endpoint, FAULTS[fault])
        answer = desk.push()
        assert answer.get("commit") == desk.repo.head.oid, (endpoint, answer)
        assert desk.titles() == [f"Add {JOB}"]
        assert desk.pushed() == etags(desk.dataset)


def test_a_connection_lost_at_any_call_of_any_endpoint_changes_nothing(desk: Desk) -> None:
    """For every endpoint and n = 1, 2, ...: the n-th call takes effect, but its answer is lost."""
    desk.push(repo_id="org/clean")
    calls = dict(desk.hub.calls)
    for endpoint, count in calls.items():
        for nth in range(2, count + 1):
            desk.hub.forget()
            desk.hub.fail(endpoint, Fault(drop="after", nth=nth))
            answer = desk.push()
            assert answer.get("commit") == desk.repo.head.oid, (endpoint, nth, answer)
            assert desk.titles() == [f"Add {JOB}"]
            assert desk.pushed() == etags(desk.dataset)


@pytest.mark.parametrize("fault", ["429", "503", "drop before"])
@pytest.mark.parametrize("endpoint", ["create", "commit", "paths_info"])
def test_five_faults_in_a_row_are_outlived(desk: Desk, endpoint: str, fault: str) -> None:
    one = FAULTS[fault]
    desk.hub.fail(endpoint, Fault(status=one.status, headers=one.headers, drop=one.drop, times=5))
    answer = desk.push()
    assert answer.get("commit") == desk.repo.head.oid, answer
    assert len(answer["waits"]) == 5
    assert desk.titles() == [f"Add {JOB}"]


def test_a_commit_whose_answer_was_lost_before_a_crash_is_not_made_again(desk: Desk) -> None:
    """1. The commit stands, but its answer and all later calls are lost. 2. The push ends. 3. It runs."""
    desk.hub.fail("commit", Fault(drop="after"))
    desk.hub.fail("info", Fault(status=503, nth=4, times=1000))
    assert desk.push()["error"] == "HubUnavailable"
    desk.hub.heal()
    assert desk.push()["commit"] == desk.repo.head.oid
    assert desk.titles() == [f"Add {JOB}"]


def test_the_wait_that_the_hub_asks_for_is_kept(desk: Desk) -> None:
    desk.hub.fail("commit", Fault(status=429, headers={"Retry-After": "77"}))
    assert desk.push()["waits"] == [77.0]


def test_a_hub_that_never_answers_rightly_is_unavailable_and_keeps_what_it_has(desk: Desk) -> None:
    desk.hub.fail("commit", Fault(status=503, times=10_000))
    answer = desk.push()
    assert answer["error"] == "HubUnavailable"
    assert answer["type"] == "urn:quarry:hub-unavailable"
    assert len(answer["waits"]) == 7
    assert desk.titles() == []


@pytest.mark.parametrize(
    ("token", "repo_id"), [(READ_TOKEN, REPO), ("hf_unknown", REPO), (TOKEN, "elsewhere/states")]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_token_without_the_right_to_write_is_denied_naming_the_repository(
    desk: Desk, token: str, repo_id: str, exists: bool
) -> None:
    if exists:
        desk.hub.add_repo(repo_id, private=True)
    answer = desk.push(token=token, repo_id=repo_id)
    assert answer["error"] == "HubDenied"
    assert answer["field"] == "hub.repo_id"
    assert answer["cure"]
    assert answer["waits"] == []
    assert not exists or len(desk.hub.repo(repo_id).commits) == 1


def test_a_token_revoked_in_the_middle_is_denied_and_a_new_one_continues(desk: Desk) -> None:
    desk.hub.meanwhile("commit", lambda: desk.hub.tokens.pop(TOKEN))
    assert desk.push()["error"] == "HubDenied"
    desk.hub.add_token("hf_new", Token("me", orgs={"org": "write"}))
    assert desk.push(token="hf_new")["commit"] == desk.repo.head.oid
    assert desk.pushed() == etags(desk.dataset)


def test_an_upload_refused_by_the_storage_alone_is_told_from_a_missing_right(desk: Desk) -> None:
    upload = MODE_ENDPOINTS[desk.mode][0]
    desk.hub.add_token("hf_shrinks", Token("me", orgs={"org": "write"}))
    shrunk = Token("me", role="read", orgs={"org": "write"})
    desk.hub.meanwhile(upload, lambda: desk.hub.add_token("hf_shrinks", shrunk))
    assert desk.push(token="hf_shrinks")["error"] == "HubDenied"


def test_the_token_is_in_no_problem_even_where_the_hub_echoes_it(desk: Desk) -> None:
    desk.hub.fail("commit", Fault(status=403, message=f"the token {TOKEN} may not"))
    answer = desk.push()
    assert answer["error"] == "HubDenied"
    assert TOKEN not in str(answer)
    assert "the token *** may not" in answer["detail"]
    assert desk.hub.seen_authorizations == {f"Bearer {TOKEN}"}


def test_a_public_repository_is_refused_where_a_private_one_was_asked_for(desk: Desk) -> None:
    desk.hub.add_repo(REPO, private=False)
    answer = desk.push()
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.private")
    assert desk.push(private=False)["commit"] == desk.repo.head.oid


def test_two_jobs_share_a_repository_and_the_card_lists_both(desk: Desk, tmp_path: Path) -> None:
    desk.push()
    desk.push(desk.other)
    assert desk.titles() == [f"Add {JOB}", f"Add {OTHER_JOB}"]
    both = etags(desk.dataset) | etags(desk.other)
    assert {p: e for p, e in desk.pushed().items() if p != "README.md"} == {
        p: e for p, e in both.items() if p != "README.md"
    }
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


def committed(folder: Path) -> dict[str, Any]:
    """Return a folder's files as a commit of a client in LFS mode holds them."""
    files = {}
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            large = file.suffix in (".parquet", ".safetensors")
            digest = hashlib.sha256(content).hexdigest()
            blob = large_blob(digest, len(content), content) if large else regular_blob(content)
            files[file.relative_to(folder).as_posix()] = blob
    return files


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
    """A job of 122 files besides manifest and card."""
    folder = tmp_path_factory.mktemp("many")
    a_dataset(folder, units=60, rows=1)
    return folder


def test_many_files_take_several_commits_and_the_manifest_comes_with_the_last(desk: Desk, many: Path) -> None:
    desk.push(many)
    assert desk.titles() == [f"Add files of {JOB}", f"Add {JOB}"]
    start, half, whole = desk.repo.commits
    added = [len(half.tree) - len(start.tree), len(whole.tree) - len(half.tree)]
    assert added == [24, 100]
    assert manifest_path(JOB) not in half.tree
    assert "README.md" not in half.tree
    assert desk.pushed() == etags(many)
    assert sum(desk.hub.calls[e] for e in ("info", "tree", "paths_info", "preupload", "commit")) < 40


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


def test_a_shard_that_changed_after_sealing_is_never_committed(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "rotten"
    shutil.copytree(desk.dataset, folder)
    shard = next((folder / "data").rglob("*.parquet"))
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    answer = desk.push(folder)
    assert answer["error"] == "DatasetBroken"
    assert shard.name in answer["detail"]
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

    desk.hub.fail("paths_info", Fault(status=503, nth=10_000))
    desk.hub.meanwhile("commit", lambda: desk.hub.meanwhile("paths_info", again))
    answer = desk.push()
    assert answer["error"] == "HubUnavailable"
    assert path in answer["detail"]
