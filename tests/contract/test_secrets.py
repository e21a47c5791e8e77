"""A service with marked secrets meets success, refusals, retries and a kill: no secret comes out."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import MetaData, create_engine, make_url, select

from schemas.job import RESTING_JOB_STATES, JobState, JobSummary
from tests.support.children import children_of
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, Token
from tests.support.pg import Postgres
from tests.support.service_process import QUARRY, ROOT, Serving, body_of, serving
from tests.support.tiny_model import random_target

TOKEN, PASSWORD, ADMIN = "hf_MarkedToken0123456789", "MarkedPassword0123456789", "MarkedAdminKey" * 3
REPO = "org/states"
QUOTING = Fault(status=500, message=f"failed for Authorization: Bearer {TOKEN}")


class Seen:
    """Everything that came out, by where it was seen."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, bytes]] = []

    def add(self, where: str, text: bytes | str) -> None:
        self.texts.append((where, text if isinstance(text, bytes) else text.encode()))

    def processes(self, root: int) -> None:
        """Look at every process that `root` has started; its own environment is the operator's."""
        pids, waiting = [root], [root]
        while waiting:
            found = children_of(waiting.pop())
            pids += found
            waiting += found
        for pid in pids:
            for name in ("limits", "cmdline", *(["environ"] if pid != root else [])):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    self.add(f"{name} of a process", Path(f"/proc/{pid}/{name}").read_bytes())

    def files(self, folder: Path, *, but: tuple[str, ...]) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in but:
                self.add(str(path), path.read_bytes())

    def rows(self, url: str) -> None:
        engine = create_engine(url)
        tables = MetaData()
        tables.reflect(engine)
        with engine.connect() as connection:
            for table in tables.sorted_tables:
                self.add(f"table {table.name}", repr(connection.execute(select(table)).all()))
        engine.dispose()

    def hits(self, secrets: tuple[str, ...]) -> list[tuple[str, str]]:
        found = []
        for where, text in self.texts:
            found += [(where, secret) for secret in secrets if secret.encode() in text]
        return found


class Api:
    """The service's API with a key; every answer is kept."""

    def __init__(self, url: str, key: str, seen: Seen) -> None:
        self._client = httpx2.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )
        self._seen = seen

    def __call__(self, method: str, path: str, **options: Any) -> httpx2.Response:
        answer = self._client.request(method, path, **options)
        self._seen.add(f"{method} {path}", answer.content + repr(answer.headers).encode())
        return answer

    def until(self, job_id: str, *states: JobState) -> JobSummary:
        while True:
            job = JobSummary.model_validate(self("GET", f"/jobs/{job_id}").json())
            if job.state in states or job.state in RESTING_JOB_STATES:
                return job
            time.sleep(0.2)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(cas=None) as opened:
        opened.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        yield opened


def quarry(environment: dict[str, str], seen: Seen, *arguments: str, timeout_s: float = 300) -> int | None:
    """Run a command; return its exit code, or none if it was killed after a time."""
    started = subprocess.Popen(
        [*QUARRY, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = started.communicate(timeout=timeout_s)
        code: int | None = started.returncode
    except subprocess.TimeoutExpired:
        started.kill()
        output, _ = started.communicate()
        code = None
    seen.add(f"quarry {arguments[0]}", output)
    return code


def drive(api: Api, hub: FakeHub, target: Path, service: Serving, seen: Seen) -> str:
    """Run a job to its end and others into refusals; return the first one's id."""
    job: str = api("POST", "/extract", json=body_of(target, hub={"repo_id": REPO})).json()["id"]
    api.until(job, JobState.RUNNING)
    seen.processes(service.process.pid)
    assert service.worker is not None
    os.kill(service.worker, signal.SIGKILL)
    hub.fail("commit", QUOTING)
    hub.fail("tree", QUOTING)
    assert api.until(job, JobState.COMPLETED).state is JobState.COMPLETED
    other = body_of(target, hub={"repo_id": REPO, "config_name": "other"})
    denied = Fault(status=403, message=f"{TOKEN} may not write", times=100)
    hub.fail("preupload", denied)
    hub.fail("commit", denied)
    blocked: str = api("POST", "/extract", json=other).json()["id"]
    assert api.until(blocked, JobState.COMPLETED).state is JobState.BLOCKED
    hub.heal()
    for endpoint in ("info", "whoami"):
        hub.fail(endpoint, Fault(status=500, message=f"failed for {TOKEN}", times=20))
    for wrong in ({"model": "org/none"}, {"chat_template": "{{"}, {"hub": {"repo_id": "org/x"}}, {"x": 1}):
        assert api("POST", "/extract", json=body_of(target) | wrong).status_code >= 400
    hub.heal()
    for path in ("", "/request", "/manifest", "/units", "/rejects", "/events"):
        api("GET", f"/jobs/{job}{path}")
        api("GET", f"/jobs/{blocked}{path}")
    seen.processes(service.process.pid)
    return job


@pytest.mark.slow
def test_no_secret_comes_out_on_any_path(tmp_path: Path, hub: FakeHub, postgres: Postgres) -> None:
    """1. A job whose worker is killed is pushed after errors of the Hub. 2. Another is denied.

    3. Requests are refused. 4. The dataset is verified and published. 5. A database is not there.
    """
    seen, log = Seen(), list[str]()
    target = random_target(tmp_path / "model", layers=4, hidden=64)
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    for name, secret in (("admin", ADMIN), ("token", TOKEN)):
        (tmp_path / name).write_text(secret)
    own = {
        "TMPDIR": str(tmp_path / "tmp"),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "QUARRY_HUB_ENDPOINT": hub.url,
    }
    with postgres.database() as lent:
        url = make_url(lent).set(password=PASSWORD).render_as_string(hide_password=False)
        settings = own | {
            "QUARRY_DATABASE_URL": url,
            "QUARRY_HUB_TOKEN": TOKEN,
            "QUARRY_ADMIN_KEY_FILE": str(tmp_path / "admin"),
            "QUARRY_FAKE_STEP_S": "1",
            "QUARRY_LEASE_S": "1",
        }
        with serving(tmp_path / "data", on_line=log.append, **settings) as service:
            admin = Api(service.url, ADMIN, Seen())
            grants = {"name": "team", "scopes": ["jobs:read", "jobs:write"], "hub_namespaces": ["org"]}
            key = admin("POST", "/keys", json=grants | {"model_roots": ["/"]}).json()["key"]
            admin.close()
            api = Api(service.url, key, seen)
            job = drive(api, hub, target, service, seen)
            api.close()
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(120) == 0
        seen.add("log", "".join(log))
        desk = os.environ | own | {"PYTHONPATH": str(ROOT), "QUARRY_HUB_TOKEN_FILE": str(tmp_path / "token")}
        hub.fail("info", QUOTING)
        quarry(desk, seen, "verify", REPO)
        assert quarry(desk, seen, "verify", REPO) == 0
        assert quarry(desk, seen, "publish", str(tmp_path / "data" / "jobs" / job), REPO) == 0
        for wrong in ({"QUARRY_PORT": "x"}, {"QUARRY_DATABASE_URL": url.replace("psycopg", "other")}):
            assert (
                quarry(desk | {"QUARRY_PORT": "0"} | {"QUARRY_DATABASE_URL": url} | wrong, seen, "serve") == 2
            )
        away = url.replace("?host=", "?host=/nowhere")
        assert quarry(desk | {"QUARRY_DATABASE_URL": away}, seen, "worker", timeout_s=10) is None
        seen.rows(url)
    seen.files(tmp_path, but=("admin", "token"))
    assert seen.hits((TOKEN, PASSWORD, ADMIN, key.split("_", 2)[2])) == []
    limits = [text for where, text in seen.texts if where == "limits of a process" and text]
    assert [text for text in limits if not re.search(rb"Max core file size +0 +0 ", text)] == []
    kinds = ("log", "environ of a process", "table job", "table api_key", "quarry verify")
    assert {where for where, text in seen.texts if text} >= set(kinds)
