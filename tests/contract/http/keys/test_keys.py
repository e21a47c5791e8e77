"""API keys: who is let in, to what, and that an owner sees nothing of another's."""

import json
import secrets
import socket
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
import typer
from sqlalchemy import Text, cast, text, update

from schemas.keys import Grants, Scope
from service.cli.keys import list_keys
from service.client import Quarry
from service.control.keys import check_bind
from service.errors import OptionRefused
from service.settings import Settings
from service.store import Store, keys
from service.store.tables import API_KEY, JOB
from tests.contract.http.keys.conftest import ADMIN, EVERY, add, add_nightly, bearer, roots
from tests.support.api import UNKNOWN, api_settings, job_body, problem_of, serving, small_target, stored
from tests.support.store_cases import lease_plan


def operations(api: httpx2.Client) -> list[tuple[str, str]]:
    """Return the method and path of every route, with names that nothing has."""
    paths = api.get("/openapi.json").json()["paths"]
    names = {"{job_id}": UNKNOWN, "{name}": "nightly", "{key_id}": "00000000"}
    found = []
    for path, methods in paths.items():
        for placeholder, name in names.items():
            path = path.replace(placeholder, name)
        found += [(method, path) for method in methods]
    return found


def test_every_route_but_the_probes_asks_for_a_key(api: httpx2.Client) -> None:
    _, reading = add(api, scopes=["jobs:read"])
    may_read = {path for method, path in operations(api) if method == "get" and path.startswith("/jobs")}
    assert len(may_read) == 9
    for method, path in operations(api):
        if path in ("/healthz", "/readyz"):
            assert api.request(method, path).status_code == 200
            continue
        for headers in ({}, bearer(f"qk_00000000_{'x' * 43}"), bearer("x"), {"Authorization": "Basic eDp4"}):
            answer = api.request(method, path, headers=headers)
            problem_of(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        if method != "get" or path not in may_read:
            problem = problem_of(api.request(method, path, headers=reading), 403)
            assert problem.field == "Authorization"
    for path in may_read:
        assert api.get(path, headers=reading).status_code in (200, 404)


@pytest.mark.parametrize("scope", EVERY)
def test_a_scope_opens_its_routes_alone(api: httpx2.Client, scope: str) -> None:
    opens = {
        "jobs:read": ("get", "/jobs"),
        "jobs:write": ("post", f"/jobs/{UNKNOWN}/cancel"),
        "schedules": ("get", "/schedules"),
        "metrics": ("get", "/metrics"),
    }
    _, headers = add(api, scopes=[scope])
    for other, (method, path) in opens.items():
        refused = api.request(method, path, headers=headers).status_code == 403
        assert refused == (other != scope)


def test_a_key_that_is_revoked_or_expired_is_refused(api: httpx2.Client, store: Store) -> None:
    key_id, headers = add(api)
    assert api.get("/jobs", headers=headers).status_code == 200
    revoked = api.delete(f"/keys/{key_id}", headers=bearer(ADMIN)).json()["revoked_at"]
    problem_of(api.get("/jobs", headers=headers), 401)
    assert api.delete(f"/keys/{key_id}", headers=bearer(ADMIN)).json()["revoked_at"] == revoked
    assert problem_of(api.delete("/keys/00000000", headers=bearer(ADMIN)), 404).field == "key_id"
    _, headers = add(api, expires_at=(datetime.now(UTC) + timedelta(days=1)).isoformat())
    assert api.get("/jobs", headers=headers).status_code == 200
    _, headers = add(api, expires_at=(datetime.now(UTC) - timedelta(days=1)).isoformat())
    problem_of(api.get("/jobs", headers=headers), 401)
    never = {"name": "team-a", "scopes": EVERY, "expires_at": "0001-01-01T00:00:00+14:00"}
    assert problem_of(api.post("/keys", json=never, headers=bearer(ADMIN)), 422).field == "expires_at"


def test_the_secret_is_shown_once_and_stored_nowhere(api: httpx2.Client, store: Store) -> None:
    _, headers = add(api)
    key = headers["Authorization"].removeprefix("Bearer ")
    assert len(key.split("_", 2)[2]) == 43
    assert key not in api.get("/keys", headers=bearer(ADMIN)).text
    with store.writing() as tx:
        rows = tx.connection.execute(text("SELECT * FROM api_key")).all()
    assert len(rows) == 1
    assert key.split("_", 2)[2] not in repr(rows)


def test_an_owner_sees_nothing_of_anothers(api: httpx2.Client, store: Store, model: Path) -> None:
    (_, mine), (_, others) = add(api, **roots(model)), add(api, "team-b", **roots(model))
    body = job_body(model)
    job = api.post("/extract", json=body, headers=mine | {"Idempotency-Key": "one"}).json()
    assert job["owner"] == "team-a"
    again = api.post("/extract", json=body, headers=mine | {"Idempotency-Key": "one"}).json()
    assert again["id"] == job["id"]
    theirs = api.post("/extract", json=body, headers=others | {"Idempotency-Key": "one"}).json()
    assert theirs["id"] != job["id"]
    add_nightly(api, model, mine)
    bodies = {"patch": {"priority": 1}, "post": {}}
    for method, path in operations(api):
        if UNKNOWN not in path and "nightly" not in path:
            continue
        path = path.replace(UNKNOWN, job["id"])
        send = {"samples": [{"text": "x"}]} if path.endswith("samples") else bodies.get(method)
        if "nightly" in path and method == "patch":
            send = {"paused": True}
        body_of = {} if send is None or path.endswith("/run") else {"json": send}
        answer = problem_of(api.request(method, path, headers=others, **body_of), 404)
        path = path.replace(job["id"], UNKNOWN).replace("nightly", "other")
        unknown = problem_of(api.request(method, path, headers=others, **body_of), 404)
        assert answer.detail == unknown.detail.replace(UNKNOWN, job["id"]).replace("other", "nightly")
        assert (answer.type, answer.cure) == (unknown.type, unknown.cure)
    assert [row["id"] for row in api.get("/jobs", headers=others).json()["jobs"]] == [theirs["id"]]
    problem_of(api.get("/jobs", params={"cursor": job["id"]}, headers=others), 422)
    assert api.get("/schedules", headers=others).json()["schedules"] == []
    assert len(api.get("/jobs", headers=bearer(ADMIN)).json()["jobs"]) == 2
    assert api.get(f"/jobs/{job['id']}", headers=add(api)[1]).status_code == 200, "a key of the same name"


def test_an_owner_sees_nothing_of_a_job_of_anothers_that_cannot_be_read(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    (_, mine), (_, others) = add(api, **roots(model)), add(api, "team-b")
    job = api.post("/extract", json=job_body(model), headers=mine).json()
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(identity=cast("{", Text)))
    problem_of(api.get(f"/jobs/{job['id']}", headers=mine), 500)
    problem_of(api.get(f"/jobs/{job['id']}", headers=others), 404)


def test_no_request_reads_what_was_posted_to_a_schedule(
    api: httpx2.Client, settings: Settings, model: Path
) -> None:
    """Not a word of another's, nor a count of its tokens; and no folder is made for any name."""
    (_, mine), (_, others) = (
        add(api, **roots(model)),
        add(api, "team-b", **roots(model), scopes=["jobs:write"]),
    )
    add_nightly(api, model, mine, posted=True)
    secret = {"samples": [{"token_ids": [1, 2, 3]}]}
    assert api.post("/schedules/nightly/samples", json=secret, headers=mine).status_code == 202
    before = list((settings.data_dir / "spool").iterdir())
    for path in ("/extract", "/estimate"):
        for name in ("nightly", "unknown"):
            body = job_body(model, source={"kind": "posted", "schedule": name})
            problem = problem_of(api.post(path, json=body, headers=others), 422)
            assert problem.field == "source.schedule"
        body = job_body(model, source={"kind": "posted"})
        problem = problem_of(api.post(path, json=body, headers=others), 422)
        assert problem.field == "source.kind"
        assert "make a schedule" in str(problem.cure)
    assert list((settings.data_dir / "spool").iterdir()) == before


def test_samples_go_to_the_schedule_that_had_the_name_before_their_body_came(
    api: httpx2.Client, settings: Settings, model: Path
) -> None:
    """1. B begins to post, and deletes the schedule. 2. A makes one of the name. 3. B ends the body."""
    (_, a), (_, b) = add(api, **roots(model)), add(api, "team-b", **roots(model))
    add_nightly(api, model, b, posted=True)
    body = b'{"samples": [{"text": "planted"}]}'
    head = (
        "POST /schedules/nightly/samples HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: {b['Authorization']}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection((api.base_url.host, api.base_url.port), 30) as posting:
        posting.sendall(head.encode())
        assert b"100 Continue" in posting.recv(1000), "the body is waited for"
        assert api.delete("/schedules/nightly", headers=b).status_code == 204
        add_nightly(api, model, a, posted=True)
        posting.sendall(body)
        answer = posting.makefile("rb").read()
    assert b" 404 " in answer.splitlines()[0], answer
    assert list(settings.data_dir.glob("spool/*/*")) == []


def test_a_key_uses_its_own_folders_and_namespaces_alone(
    api: httpx2.Client, settings: Settings, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rows.jsonl").write_text('{"text": "x"}\n')
    _, headers = add(api, model_roots=[str(model.parent)], hub_namespaces=["team-a"])
    refused = problem_of(
        api.post("/extract", json=job_body(small_target(tmp_path / "other")), headers=headers), 422
    )
    assert refused.field == "model"
    source = {"kind": "file", "path": str(tmp_path / "private" / "rows.jsonl")}
    problem_of(api.post("/extract", json=job_body(model, source=source), headers=headers), 422)
    problem_of(api.post("/estimate", json=job_body(model, source=source), headers=headers), 422)
    hub = {"repo_id": "somebody/states"}
    refused = problem_of(api.post("/extract", json=job_body(model, hub=hub), headers=headers), 403)
    assert (refused.type, refused.field) == ("urn:quarry:hub-denied", "hub.repo_id")
    _, outside = add(api, source_roots=["/"], model_roots=["/"])
    problem_of(api.post("/extract", json=job_body(Path("/")), headers=outside), 422)


@pytest.mark.parametrize(
    ("folder", "is_json", "told"),
    [("/input/\0", True, "no folder can have the name"), ("/input/\ud800", False, "the body is not JSON")],
)
@pytest.mark.parametrize("field", ["source_roots", "model_roots"])
def test_a_key_names_no_folder_that_cannot_exist(
    api: httpx2.Client, field: str, folder: str, is_json: bool, told: str
) -> None:
    body = json.dumps({"name": "team-a", "scopes": EVERY, field: [folder]})
    headers = bearer(ADMIN) | {"Content-Type": "application/json"}
    problem = problem_of(api.post("/keys", content=body, headers=headers), 422)
    assert problem.field == (field if is_json else None) and told in problem.detail
    assert api.get("/keys", headers=headers).json()["keys"] == []


def test_a_job_is_planned_with_what_its_owners_keys_allow_then(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    key_id, headers = add(api, model_roots=[str(model.parent)])
    assert api.post("/extract", json=job_body(model), headers=headers).status_code == 202
    planned = lease_plan(store).grants
    assert planned == Grants(scopes=(Scope.JOBS_READ,), model_roots=(str(model.parent),))
    api.delete(f"/keys/{key_id}", headers=bearer(ADMIN))
    assert api.post("/extract", json=job_body(model), headers=bearer(ADMIN)).status_code == 202
    assert lease_plan(store).grants is None
    _, headers = add(api, "team-b", model_roots=[str(model.parent)])
    assert api.post("/extract", json=job_body(model), headers=headers).status_code == 202
    for key in api.get("/keys", headers=bearer(ADMIN)).json()["keys"]:
        api.delete(f"/keys/{key['id']}", headers=bearer(ADMIN))
    assert lease_plan(store).grants == Grants(scopes=(Scope.JOBS_READ,))


def test_the_admins_file_may_be_replaced_while_the_service_runs(
    api: httpx2.Client, settings: Settings
) -> None:
    assert api.get("/keys", headers=bearer(ADMIN)).status_code == 200
    assert settings.admin_key_file is not None
    settings.admin_key_file.write_text("b" * 32)
    problem_of(api.get("/keys", headers=bearer(ADMIN)), 401)
    assert api.get("/keys", headers=bearer("b" * 32)).status_code == 200


def test_on_the_loopback_no_key_is_needed_until_there_is_one(tmp_path: Path) -> None:
    with serving(api_settings(tmp_path)) as api:
        assert api.get("/jobs").status_code == 200
        problem_of(api.post("/keys", json={"name": "team-a", "scopes": ["jobs:read"]}), 409)
        admin = {"name": "admin", "scopes": ["admin"]}
        problem_of(api.post("/keys", json=admin | {"expires_at": "2030-01-01T00:00:00Z"}), 409)
        key = api.post("/keys", json=admin).json()["key"]
        problem_of(api.get("/jobs"), 401)
        assert api.get("/jobs", headers=bearer(key)).status_code == 200
        key_id = api.get("/keys", headers=bearer(key)).json()["keys"][0]["id"]
        assert api.delete(f"/keys/{key_id}", headers=bearer(key)).status_code == 200
        problem_of(api.get("/jobs"), 401)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_the_loopback_nothing_is_served_without_a_key(tmp_path: Path, host: str) -> None:
    settings = api_settings(tmp_path, host=host)
    with stored(settings) as store:
        with pytest.raises(OptionRefused) as refused:
            check_bind(store, settings)
        assert refused.value.field == "host"
        assert "QUARRY_ADMIN_KEY_FILE" in str(refused.value.cure)
        keyed = settings.model_copy(update={"admin_key_file": tmp_path / "admin"})
        with pytest.raises(OptionRefused, match="cannot be read"):
            check_bind(store, keyed)
        (tmp_path / "admin").write_text("short")
        with pytest.raises(OptionRefused, match="32"):
            check_bind(store, keyed)
        (tmp_path / "admin").write_text(secrets.token_hex(16))
        check_bind(store, keyed)
        check_bind(store, settings.model_copy(update={"host": "127.0.0.1"}))
    with serving(settings, bind="127.0.0.1") as api:
        problem_of(api.get("/jobs", headers={"Host": "localhost"}), 401)


def test_a_key_that_cannot_be_read_is_named_and_keeps_no_other_owner_from_deleting(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    """As after a return from a version whose keys grant more."""
    (_, mine), (damaged, others) = add(api, **roots(model)), add(api, "team-b")
    job = api.post("/extract", json=job_body(model), headers=mine).json()["id"]
    api.post(f"/jobs/{job}/cancel", headers=mine)
    with store.writing() as tx:
        of_key = update(API_KEY).where(API_KEY.c.id == damaged)
        tx.connection.execute(of_key.values(grants=cast('{"scopes": ["metrics"], "more": 1}', Text)))
    problem = problem_of(api.get("/jobs", headers=others), 500)
    assert f"of key {damaged} cannot be read: more: Extra inputs" in problem.detail
    assert store.read(keys.limited_owners) == {"team-b"}, "it may be"
    assert api.delete(f"/jobs/{job}", headers=mine).status_code == 204


def test_keys_that_cannot_be_read_are_listed_behind_the_others_and_fail_the_command_until_revoked(
    api: httpx2.Client, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator could not find the second of them, nor any other key."""
    first, whole, last = (add(api, name)[0] for name in ("team-a", "team-b", "team-c"))
    with store.writing() as tx:
        tx.connection.execute(update(API_KEY).where(API_KEY.c.id != whole).values(grants=cast("{", Text)))
    answer = api.get("/keys", headers=bearer(ADMIN)).json()
    assert [key["id"] for key in answer["keys"]] == [whole]
    assert [(key["id"], key["name"]) for key in answer["unreadable"]] == [(first, "team-a"), (last, "team-c")]
    with Quarry(str(api.base_url), key=ADMIN) as quarry:
        for left in ([first, last], [last], []):
            with pytest.raises(typer.Exit) if left else nullcontext():
                list_keys(quarry)
            said = capsys.readouterr()
            assert (whole in said.out, [one for one in (first, last) if one in said.err]) == (True, left)
            if left:
                problem_of(api.delete(f"/keys/{left[0]}", headers=bearer(ADMIN)), 500)
    assert all(key["revoked_at"] for key in api.get("/keys", headers=bearer(ADMIN)).json()["unreadable"])


def test_a_key_that_cannot_be_read_can_be_revoked_and_replaced(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    damaged, old = add(api, **roots(model))
    with store.writing() as tx:
        tx.connection.execute(update(API_KEY).where(API_KEY.c.id == damaged).values(grants=cast("{", Text)))
    problem = problem_of(api.delete(f"/keys/{damaged}", headers=bearer(ADMIN)), 500)
    assert f"it is revoked, but what is stored of key {damaged} cannot be read" in problem.detail
    problem_of(api.get("/jobs", headers=old), 401)
    _, new = add(api, **roots(model))
    assert api.post("/extract", json=job_body(model), headers=new).status_code == 202
    assert store.read(keys.limited_owners) == set()
