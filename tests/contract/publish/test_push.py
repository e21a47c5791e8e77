"""One job to a Hub and back, with the real client in LFS and xet mode, whatever goes wrong on the way."""

from pathlib import Path

import pytest

from schemas.request import HubTarget
from service.errors import OptionRefused
from service.publish.publisher import publish_folder
from service.settings import Settings
from tests.support.desk import READ_TOKEN, REPO, TOKEN, Desk, etags
from tests.support.finished_job import (
    JOB,
    layer_bytes,
)
from tests.support.hub_client import HubClient
from tests.support.hub_state import Fault, Token

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


def test_a_job_becomes_one_commit_that_holds_exactly_its_folder(desk: Desk) -> None:
    answer = desk.push()
    assert answer["commit"] == desk.repo.head.oid
    assert desk.titles() == [f"Add {JOB}"]
    assert desk.pushed() == etags(desk.dataset)
    assert desk.repo.private


def test_more_shards_than_a_folder_of_a_repository_takes_are_refused_before_a_byte_is_sent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", 0)
    settings = Settings(hub_endpoint=desk.hub.url, hub_token=TOKEN)
    with pytest.raises(OptionRefused, match="shards") as refusal:
        publish_folder(desk.dataset, HubTarget(repo_id=REPO), settings)
    assert (refusal.value.field, dict(desk.hub.calls)) == ("storage.shard_bytes", {})


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


@pytest.mark.slow
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
    desk.hub.fail("info", Fault(status=503, nth=5, times=1000))
    assert desk.push()["error"] == "HubUnavailable"
    assert desk.titles() == [f"Add {JOB}"]
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


def test_a_history_that_is_rewritten_in_the_middle_is_no_missing_right_and_the_next_push_goes_on(
    desk: Desk,
) -> None:
    """1. We read the branch. 2. A person squashes its history: our head is gone. 3. The push runs again."""
    desk.hub.add_repo(REPO, private=True)

    def squash() -> None:
        last = desk.repo.commits.pop()
        desk.repo.add("squashed", last.tree)

    desk.hub.meanwhile("paths_info", squash)
    answer = desk.push()
    assert (answer["error"], answer["waits"]) == ("HubUnavailable", [])
    assert desk.push()["commit"] == desk.repo.head.oid
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
