"""The page over HTTP: who sees what, what a browser may do with it, and what strangers wrote does nothing."""

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import httpx2
import pytest
from sqlalchemy import update

from schemas.job import JobState, Problem
from schemas.worker import WorkerStatus
from service.errors import EngineDied, NotFound
from service.page import session
from service.page.jobs import job_context
from service.settings import Settings
from service.store import Store, deletion, hosts, jobs, plans, runs, schedules, workers
from service.store.tables import JOB, SICKNESS
from service.store.transitions import lock_job, record
from tests.contract.page.conftest import (
    ADMIN,
    add_key,
    bearer,
    cancel_others,
    cookie,
    cookie_name,
    of_job,
    sign_in,
    submit,
    text_of,
)
from tests.support.api import api_settings, begin, complete, job_body, reject, serving, small_target, stored
from tests.support.store_cases import lease_unit, start_units, stop_job

BIDI = "\u202e\u2066\x1b\x00"
EVIL = (
    "<script>document.title='owned'</script>\"><img src=x onerror=\"document.title='owned'\">"
    "'{{7*7}}</title></textarea>javascript:alert(1)" + BIDI
)
LONG = "x" * 10_000


def test_without_a_key_every_page_leads_to_the_sign_in(api: httpx2.Client):
    for path in (
        "/",
        "/ui/jobs/j-0000000000000000",
        "/ui/workers",
        "/ui/schedules",
        "/?state=running&limit=5",
    ):
        for headers in ({}, bearer(), {"Cookie": f"{cookie_name(api)}={ADMIN}"}):
            answer = api.get(path, headers=headers)
            assert answer.status_code == 303, "a key that is no cookie opens the API alone"
            assert answer.headers["location"] == f"/ui/sign-in?{urlencode({'to': path})}"
        form = text_of(api.get(answer.headers["location"]))
        (to,) = re.findall(r'name="to" value="([^"]*)"', form)
        assert sign_in(api, to=unescape(to)).headers["location"] == path


def test_the_cookie_opens_no_route_of_the_api(api: httpx2.Client):
    signed_in, number = cookie(api), 0
    for path, methods in api.get("/openapi.json").json()["paths"].items():
        for method in methods:
            if path not in ("/healthz", "/readyz"):
                path = path.replace("{job_id}", "j-0000000000000000").replace("{key_id}", "00000000")
                answer = api.request(method, re.sub(r"{\w+}", "name", path), headers=signed_in)
                assert answer.status_code == 401, (method, path)
                number += 1
    assert number > 25


def test_a_key_is_entered_once_and_its_cookie_is_kept_from_scripts_and_other_sites(api: httpx2.Client):
    answer = sign_in(api)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/workers")
    words = answer.headers["set-cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict", "path=/", "max-age=2592000"} <= set(words)
    assert "secure" not in words
    assert ADMIN not in answer.headers["set-cookie"]
    name = f"{api.base_url.host}:{api.base_url.port}"
    over_tls = sign_in(api, Origin=f"https://{name}")
    assert "secure" in over_tls.headers["set-cookie"].lower().split("; ")
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert sign_in(api, **headers).status_code == 403
    form = api.get("/ui/sign-in")
    assert form.headers["referrer-policy"] == "same-origin", "else a browser hides where the form is from"


def test_a_wrong_key_is_refused_and_quoted_nowhere(api: httpx2.Client):
    answer = sign_in(api, "qk_00000000_" + "x" * 43)
    assert "set-cookie" not in answer.headers
    assert "xxxx" not in text_of(answer, 401)


def test_a_form_of_too_many_fields_is_refused(api: httpx2.Client):
    assert api.post("/ui/sign-in", data=dict.fromkeys("abcdef", "x")).status_code == 422


@pytest.mark.parametrize(
    "to",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "javascript:x",
        "/?a=\rb",
        "/?" + "x" * 3000,
    ],
)
def test_a_sign_in_leads_to_no_other_site(api: httpx2.Client, to: str):
    answer = api.post("/ui/sign-in", data={"key": ADMIN, "to": to})
    api.cookies.clear()
    assert answer.headers["location"] == "/"
    assert "evil" not in api.get("/ui/sign-in", params={"to": to}).text


def test_a_session_ends_with_its_key_by_signing_out_or_in_time(
    api: httpx2.Client, settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
):
    key_id, key = add_key(api)
    signed_in = cookie(api, key)
    assert "team-a" in text_of(api.get("/", headers=signed_in))
    out = api.post("/ui/sign-in", data={}, headers=signed_in)
    assert f'{cookie_name(api)}=""' in out.headers["set-cookie"]
    token = signed_in["Cookie"].partition("=")[2]
    for forged in (
        token[:-1] + ("0" if token[-1] != "0" else "1"),
        token.replace(key_id, "operator"),
        re.sub(r"[.]\d", ".9", token, count=1),
        f"{key_id}.{token}",
    ):
        assert api.get("/", headers={"Cookie": f"{cookie_name(api)}={forged}"}).status_code == 303
    monkeypatch.setattr(session, "LASTS_S", -1)
    assert api.get("/", headers=cookie(api, key)).status_code == 303
    assert api.delete(f"/keys/{key_id}", headers=bearer()).status_code == 200
    assert api.get("/", headers=signed_in).status_code == 303


@pytest.mark.parametrize("scope", ["jobs:read", "schedules", "metrics"])
def test_a_scope_opens_its_pages_alone(api: httpx2.Client, scope: str):
    _, key = add_key(api, scopes=[scope])
    signed_in = cookie(api, key)
    for other, path in (("jobs:read", "/"), ("schedules", "/ui/schedules"), ("metrics", "/ui/workers")):
        text = text_of(api.get(path, headers=signed_in), 200 if other == scope else 403)
        assert (f"no scope &#39;{other}&#39;" in text) == (other != scope)


def test_an_owner_sees_nothing_of_anothers(api: httpx2.Client, store: Store, model: Path):
    roots = {"model_roots": [str(model.parent)], "source_roots": [str(model.parent)]}
    (_, mine), (_, others) = add_key(api, "mine", **roots), add_key(api, "others", **roots)
    job_id = submit(api, model, mine)
    source = {"kind": "file", "path": str(model.parent / "*.jsonl")}
    schedule = {"name": "mine-alone", "cron": "0 3 * * *", "request": job_body(model, source=source)}
    assert api.post("/schedules", json=schedule, headers=bearer(mine)).status_code == 201
    owner, other = cookie(api, mine), cookie(api, others)
    for path in [*of_job(job_id)[:3], "/ui/schedules/mine-alone"]:
        assert api.get(path, headers=owner).status_code == 200
        answer = text_of(api.get(path, headers=other), 404)
        unknown = path.replace(job_id, "j-0000000000000000").replace("mine-alone", "mine-other")
        there_is_none = text_of(api.get(unknown, headers=other), 404)
        assert (
            answer.replace(job_id, "j-0000000000000000").replace("mine-alone", "mine-other") == there_is_none
        )
    for path in ("/", "/ui/schedules"):
        assert job_id not in api.get(path, headers=other).text
        assert "mine-alone" not in api.get(path, headers=other).text
    assert job_id in api.get("/", headers=cookie(api)).text, "an admin sees all"


def test_every_answer_bounds_what_a_browser_does_with_it(api: httpx2.Client):
    signed_in = cookie(api)
    style = re.search(r'href="(/ui/static/[^"]*css)"', api.get("/", headers=signed_in).text)
    assert style is not None
    for path in (
        "/",
        "/ui/workers",
        "/ui/sign-in",
        "/ui/jobs/x",
        "/?state=none",
        "/ui/none",
        "/ui/",
        style[1],
    ):
        headers = api.get(path, headers=signed_in).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert {"script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy.split("; "))
        assert headers["x-content-type-options"] == "nosniff"
        kept = "immutable" if path == style[1] else "no-store"
        assert kept in headers["cache-control"]
    for path in (style[1].replace(style[1].split("/")[3], "x"), style[1].replace("page.css", "page.js")):
        assert "no such file" in text_of(api.get(path), 404), "of another version of the service"
        assert api.get(path).headers["cache-control"] == "no-store"
    assert "field <code>" not in text_of(api.get("/?colour=red", headers=signed_in), 422)


def test_all_is_there_without_scripts_and_lists_have_pages(api: httpx2.Client, store: Store, model: Path):
    signed_in = cookie(api)
    job_id = submit(api, model)
    cancel_others(store, job_id)
    complete(store, job_id, num_units=3, rejects=4)
    text = re.sub(r"<[^>]*>", " ", text_of(api.get(f"/ui/jobs/{job_id}", headers=signed_in)))
    text = " ".join(text.split())
    for words in (
        "completed",
        "samples written 3 of 7",
        "rejected 4",
        "tokens 15 of 15",
        "done 3",
        "empty 4",
    ):
        assert words in text
    assert f"quarry jobs delete {job_id}" in text
    html = api.get(f"/ui/jobs/{job_id}", headers=signed_in).text
    assert re.findall(r"<(?:section|details)(?![^>]* id=)", html) == [], "the script knows them by their ids"
    assert "quarry jobs pause" not in text, "only what is legal in its state"
    first = api.get(f"/ui/jobs/{job_id}/rejects?limit=3", headers=signed_in).text
    (following,) = re.findall(r'href="([^"]*)" rel="next"', first)
    second = api.get(f"/ui/jobs/{job_id}/rejects{following}", headers=signed_in).text
    assert ("row 5" in first, "row 5" in second, "row 6" in second) == (True, False, True)
    files = api.get(f"/ui/jobs/{job_id}/files?limit=2", headers=signed_in).text
    assert f"$QUARRY_KEY&#34; -O {api.base_url}/jobs/{job_id}/files/data/{job_id}/train-00000" in files
    (following,) = re.findall(r'href="([^"]*)" rel="next"', files)
    assert "train-00002" in api.get(f"/ui/jobs/{job_id}/files{following}", headers=signed_in).text
    other = submit(api, model)
    listed = api.get("/?limit=1", headers=signed_in).text
    (following,) = re.findall(r'href="([^"]*)" rel="next"', listed)
    assert other in listed
    assert job_id in api.get(following.replace("&amp;", "&"), headers=signed_in).text
    store.write(jobs.cancel, other)


def test_head_is_answered_as_get_without_its_body(api: httpx2.Client):
    for path in ("/", "/ui/workers", "/ui/sign-in", "/ui/none"):
        asked, headed = (api.request(method, path, headers=cookie(api)) for method in ("GET", "HEAD"))
        assert (headed.status_code, headed.content) == (asked.status_code, b""), path
        assert headed.headers["content-type"] == asked.headers["content-type"]


def test_an_address_without_a_page_is_answered_with_one(api: httpx2.Client):
    for path in ("/ui/none", "/ui/jobs/a/b/c/d", "/ui/static/x"):
        assert "no such page" in text_of(api.get(path), 404)


def test_services_on_one_host_keep_their_sessions_apart(api: httpx2.Client, tmp_path: Path):
    (tmp_path / "admin").write_text("b" * 40)
    with serving(api_settings(tmp_path, admin_key_file=tmp_path / "admin")) as other:
        both = "; ".join(cookie(one, key)["Cookie"] for one, key in ((api, ADMIN), (other, "b" * 40)))
        for one in (api, other):
            assert one.get("/", headers={"Cookie": both}).status_code == 200


def test_a_job_that_is_deleted_while_its_page_is_made_is_not_found(
    api: httpx2.Client, store: Store, model: Path
):
    job = store.read(jobs.job, submit(api, model))
    for verb in (jobs.cancel, partial(deletion.begin, with_dataset=False), deletion.forget):
        store.write(verb, job.id)
    with pytest.raises(NotFound):
        store.read(job_context, job)


def plant(store: Store, job_id: str, evil: str) -> None:
    """Put a text into every place that a page shows and that others write."""
    problem = Problem(type=evil, title=evil, status=500, detail=evil, field=evil, cure=evil)
    lease = begin(store, job_id)
    rejects = [reject(0).model_copy(update={"reason": evil, "detail": evil, "source_id": evil})]
    store.write(plans.finish, lease, rejects)
    stop_job(store, job_id, JobState.BLOCKED, problem)
    status = WorkerStatus(version=evil, engine=evil, model=evil, job=evil, devices=evil)
    host = store.write(hosts.register, "f" * 32, evil, is_home=True)
    store.write(
        workers.beat,
        evil[:200].replace("\0", ""),
        600.0,
        host=host,
        status=status,
        waits=evil.replace("\0", ""),
    )
    with store.writing() as tx:
        record(tx, lock_job(tx, job_id), "progress", evil, problem)
        named = {"owner": evil[:200].replace("\0", ""), "model": evil, "job_id": evil, "deaths": 3}
        tx.connection.execute(
            tx.insert(SICKNESS).values(model_sha256="0" * 64, problem=problem, until=tx.now, **named)
        )
        tx.connection.execute(update(JOB).where(JOB.c.id == job_id).values(model=evil, hub_commit=evil))
        number, _ = schedules.numbered(tx, "evil")
        runs.record(tx, number, datetime.now(UTC) - timedelta(hours=1), runs.RunOutcome.REFUSED, evil)


@pytest.mark.parametrize("evil", [EVIL, LONG], ids=["markup", "long"])
def test_what_others_wrote_is_shown_and_does_nothing(tmp_path: Path, evil: str):
    """On every page, in every field."""
    (tmp_path / "admin").write_text(ADMIN)
    settings = api_settings(tmp_path, admin_key_file=tmp_path / "admin")
    model = small_target(tmp_path / "model")
    with serving(settings) as api, stored(settings) as store:
        samples = [{"id": evil.replace("\0", "")[:500], "text": evil.replace("\0", "")}]
        job_id = submit(api, model, source={"kind": "inline", "samples": samples})
        source = {"kind": "file", "path": str(tmp_path / "*.jsonl")}
        schedule = {"name": "evil", "cron": "0 3 * * *", "request": job_body(model, source=source)}
        assert api.post("/schedules", json=schedule, headers=bearer()).status_code == 201
        plant(store, job_id, evil)
        signed_in = cookie(api)
        for path in ("/", *of_job(job_id)[:3], "/ui/schedules", "/ui/schedules/evil", "/ui/workers"):
            text = text_of(api.get(path, headers=signed_in))
            assert re.findall(r"<script(?! src=\"/ui/static)|<img|onerror=\"|href=\"(?!/|#|\?)", text) == []
            assert not set(BIDI) & set(text)
            assert "49</title>" not in text
            assert max(map(len, re.findall(r">([^<]*)<", text))) < 17_000
            if not path.endswith("/files"):
                assert ("&lt;script&gt;" in text) == (evil is EVIL), path
                assert evil[:50].partition("'")[0].replace("<", "&lt;").replace(">", "&gt;") in text, path


def test_why_an_engine_dies_is_shown_to_who_may_see_the_job(api: httpx2.Client, store: Store):
    keys = ADMIN, add_key(api, "ada")[1], add_key(api, "bob")[1]
    start_units(store)
    died = EngineDied("over what ada sent")
    lease = lease_unit(store)
    with store.writing() as tx:
        tx.connection.execute(update(JOB).where(JOB.c.id == lease.job_id).values(owner="ada"))
    store.write(workers.engine_died, lease, died, 3600.0, alone=False, sound=False)
    pages = [api.get("/ui/workers", headers=cookie(api, key)).text for key in keys]
    store.write(workers.leave, lease.owner)
    assert all(lease.owner in text for text in pages)
    assert [died.detail in text for text in pages] == [True, True, False]
