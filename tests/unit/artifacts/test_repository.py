"""The verbs on a Hub repository: rights, patience, and what errors say."""

import traceback
from collections.abc import Iterator

import pytest
from huggingface_hub import close_session

from schemas.request import HubTarget
from service.artifacts import hub_client
from service.artifacts.hub_client import Passing
from service.artifacts.repository import Patience, Repository
from service.errors import HubDenied, HubUnavailable, OptionRefused
from service.publish.push import check_target
from service.settings import Settings
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, Token

REPO = "org/states"
SECRET = "hf_secret"


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub(page_entries=2) as server:
        server.add_token(SECRET, Token("me", orgs={"org": "write"}))
        yield server


def patience() -> Patience:
    return Patience(attempts=3, sleep=lambda _: None)


def settings(server: FakeHub, token: str | None = SECRET) -> Settings:
    return Settings(hub_endpoint=server.url, hub_token=token)


def check(server: FakeHub, token: str | None = SECRET, **hub: object) -> None:
    check_target(HubTarget.model_validate({"repo_id": REPO} | hub), settings(server, token), patience())


def test_a_writer_may_create_and_may_write_to_what_exists(server: FakeHub) -> None:
    check(server)
    server.add_repo(REPO, private=True)
    check(server)
    check(server, repo_id="me/mine")


ORG_WRITE = {"org": ("repo.content.read", "repo.write")}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("token", "allowed"),
    [
        (Token("me", role="read", orgs={"org": "write"}), False),
        (Token("me"), False),
        (Token("me", orgs={"org": "read"}), False),
        (Token("me", orgs={"org": "contributor"}), True),
        (Token("me", orgs={"org": "admin"}), True),
        (Token("org"), True),
        (Token("me", role="fineGrained", orgs={"org": "write"}, scopes=ORG_WRITE), True),
        (Token("me", role="fineGrained", orgs={"org": "write"}, scopes={"me": ("repo.write",)}), False),
        (
            Token("me", role="fineGrained", orgs={"org": "write"}, scopes={"org": ("repo.content.read",)}),
            False,
        ),
    ],
)
def test_the_right_to_write_is_told_before_anything_runs(
    server: FakeHub, token: Token, allowed: bool, exists: bool
) -> None:
    server.add_token(SECRET, token)
    if exists:
        server.add_repo(REPO, private=True)
    if allowed:
        check(server)
        return
    with pytest.raises(HubDenied) as denied:
        check(server)
    assert denied.value.field == "hub.repo_id"
    assert denied.value.cure
    assert server.calls["create"] == 0


@pytest.mark.parametrize("token", [None, "hf_unknown"])
def test_without_a_valid_token_the_repository_is_denied(server: FakeHub, token: str | None) -> None:
    with pytest.raises(HubDenied) as denied:
        check(server, token)
    assert denied.value.field == "hub.repo_id"


def test_a_missing_token_never_falls_back_to_one_on_this_machine(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(HubDenied, match="none is set"):
        check(server, None)
    assert not server.calls


def test_a_public_repository_is_no_place_for_private_states(server: FakeHub) -> None:
    server.add_repo(REPO, private=False)
    with pytest.raises(OptionRefused) as refused:
        check(server)
    assert refused.value.field == "hub.private"
    check(server, private=False)


def test_the_name_of_the_light_configuration_is_refused_early(server: FakeHub) -> None:
    with pytest.raises(OptionRefused) as refused:
        check(server, config_name="index")
    assert refused.value.field == "hub.config_name"
    assert not server.calls


def test_a_hub_that_is_down_is_unavailable_after_bounded_tries(server: FakeHub) -> None:
    server.fail("info", Fault(status=502, times=100))
    with pytest.raises(HubUnavailable) as unavailable:
        check(server)
    assert "answered 502" in unavailable.value.detail
    assert server.calls["info"] == 3


def test_a_port_that_nobody_listens_on_is_unavailable() -> None:
    nowhere = Settings(hub_endpoint="http://127.0.0.1:9", hub_token=SECRET)
    with pytest.raises(HubUnavailable) as unavailable:
        check_target(HubTarget(repo_id=REPO), nowhere, patience())
    assert "ConnectError" in unavailable.value.detail


def test_a_process_that_is_to_stay_offline_calls_nobody(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailable, match="OfflineModeIsEnabled"):
        check(server)
    assert not server.calls


def test_a_logged_error_shows_nothing_of_the_clients_exception(server: FakeHub) -> None:
    server.add_repo(REPO, private=True)
    server.fail("auth_check", Fault(status=403, message=f"{SECRET} may not"))
    with pytest.raises(HubDenied) as denied:
        check(server)
    logged = "".join(traceback.format_exception(denied.value))
    assert "*** may not" in logged
    assert SECRET not in logged
    assert "HfHubHTTPError" not in logged


def a_hub(server: FakeHub) -> Repository:
    return Repository(HubTarget(repo_id=REPO), settings(server), patience())


def test_files_are_listed_over_all_pages_and_a_missing_folder_is_empty(server: FakeHub) -> None:
    server.add_repo(REPO, {f"manifests/{n}.json": b"%d" % n for n in range(5)} | {"manifests/x/y": b""})
    found = [file.path for file in a_hub(server).files("manifests", "main")]
    assert found == [f"manifests/{n}.json" for n in range(5)]
    assert a_hub(server).files("nowhere", "main") == []


def test_find_tells_large_files_from_small_ones_and_leaves_out_what_is_not_there(server: FakeHub) -> None:
    server.add_repo(REPO, {"a.parquet": b"large", "b/c.json": b"small"})
    found = a_hub(server).find(["a.parquet", "b/c.json", "b", "d"], "main")
    assert set(found) == {"a.parquet", "b/c.json"}
    assert found["a.parquet"].lfs is not None
    assert found["b/c.json"].lfs is None
    assert found["b/c.json"].size == 5


def test_a_file_is_read_at_a_revision_and_is_none_where_it_is_not(server: FakeHub) -> None:
    repo = server.add_repo(REPO, {"a.json": b"old"})
    old = repo.head.oid
    repo.add("newer", {"a.json": server.add_repo("org/x", {"a.json": b"new"}).head.tree["a.json"]})
    hub = a_hub(server)
    assert hub.read("a.json", "main") == b"new"
    assert hub.read("a.json", old) == b"old"
    assert hub.read("b.json", "main") is None
    assert hub.head() == repo.head.oid


def test_patience_waits_longer_each_time_within_bounds() -> None:
    waits: list[float] = []
    patient = Patience(attempts=6, first_wait_s=1.0, longest_wait_s=5.0, sleep=waits.append)

    def never() -> None:
        raise Passing("no")

    with pytest.raises(HubUnavailable):
        patient.retry(never)
    assert len(waits) == 5
    assert all(least <= wait <= 5.0 for least, wait in zip([1, 2, 4, 5, 5], waits, strict=True))


def test_patience_keeps_the_wait_it_was_asked_for() -> None:
    waits: list[float] = []
    errors = iter([Passing("busy", 17.0), Passing("busy", 0.0)])

    def call() -> str:
        for error in errors:
            raise error
        return "done"

    assert Patience(sleep=waits.append).retry(call) == "done"
    assert waits == [17.0, 0.0]


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    waits: list[float] = []

    def busy() -> None:
        raise Passing("busy", 60.0)

    with pytest.raises(HubUnavailable):
        Patience(deadline_s=15.0, sleep=waits.append).retry(busy)
    assert waits == []


def test_other_errors_are_not_tried_again() -> None:
    tries: list[int] = []

    def denied() -> None:
        tries.append(1)
        raise HubDenied("no")

    with pytest.raises(HubDenied):
        Patience(sleep=lambda _: None).retry(denied)
    assert tries == [1]


SILENT = {
    "info": Repository.head,
    "tree": lambda hub: hub.files("data", "main"),
    "paths_info": lambda hub: hub.find(["a"], "main"),
}


@pytest.mark.parametrize("endpoint", SILENT)
def test_a_connection_that_is_silent_is_given_up_whatever_limit_the_client_names(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    server.add_repo(REPO, private=True)
    server.fail(endpoint, Fault(drop="stall", times=10_000))
    monkeypatch.setattr(hub_client, "SILENCE_S", 0.2)
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub = Repository(HubTarget(repo_id=REPO), settings(server), patience())
    close_session()
    with pytest.raises(HubUnavailable, match="ReadTimeout"):
        SILENT[endpoint](hub)
    close_session()


def test_a_file_of_gigabytes_is_refused_before_it_is_fetched(server: FakeHub) -> None:
    """A card that a stranger's push left in the repository."""
    server.add_repo(REPO, {"README.md": b"x" * 1001, "jobs.json": b"x" * 1000})
    hub = Repository(HubTarget(repo_id=REPO), settings(server), patience())
    assert hub.read("jobs.json", "main", max_bytes=1000) == b"x" * 1000 and hub.read("none", "main") is None
    server.calls.clear()
    with pytest.raises(OptionRefused, match=r"README\.md in org/states has 1001 bytes") as refused:
        hub.read("README.md", "main", max_bytes=1000)
    assert refused.value.field == "hub.repo_id" and refused.value.cure
    assert list(server.calls.values()) == [1], "the file was only looked for"
