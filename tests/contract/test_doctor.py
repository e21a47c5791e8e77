"""`quarry doctor` against real databases, a Hub on the loopback, and the machine that the tests run on."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from schemas.request import HubTarget
from schemas.worker import Role, WorkerStatus
from service.doctor import engine, examination, hub, secret_files, store
from service.doctor.check_result import CheckResult, Verdict
from service.doctor.examination import judged, judged_apart
from service.errors import StoreUnavailable
from service.settings import Settings
from service.store import Store, hosts, migration, workers
from service.store.database import CLOCKS, missing_file
from service.work.runner import migrate
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, Token
from tests.support.pg import Postgres

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
OURS = version("eagle-quarry")


@pytest.fixture
def settings(tmp_path: Path, url: str) -> Settings:
    return Settings(data_dir=tmp_path, database_url=SecretStr(url))


@pytest.fixture
def served(url: str) -> Iterator[Store]:
    """A database that a service has started on, with the data folder's host."""
    opened = Store(url)
    opened.write(migration.migrate)
    opened.write(hosts.register, "a" * 32, "node-1", is_home=True)
    yield opened
    opened.close()


def found(settings: Settings) -> list[CheckResult]:
    return list(judged("database", lambda: store.database(settings)))


def verdicts(settings: Settings) -> dict[str, Verdict]:
    return {one.what: one.verdict for one in found(settings)}


def test_a_database_that_a_service_runs_on_is_good_and_nothing_is_left_in_it(
    settings: Settings, served: Store, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    assert verdicts(settings) == {"database": GOOD, "workers": GOOD, "clock": GOOD}
    assert sorted(tmp_path.iterdir()) == before
    served.close()
    left = sorted(tmp_path.iterdir())
    assert verdicts(settings) == {"database": GOOD, "workers": GOOD, "clock": GOOD}
    assert sorted(tmp_path.iterdir()) == left


def test_a_read_only_store_writes_nothing(url: str, served: Store) -> None:
    looking = Store(url, read_only=True)
    try:
        with pytest.raises((DBAPIError, StoreUnavailable), match=r"read-only|does not answer"):
            looking.write(workers.beat, "one", 60.0)
    finally:
        looking.close()


def test_an_empty_database_is_good_and_stays_empty(settings: Settings, url: str) -> None:
    missing = missing_file(url)
    (first, *others) = found(settings)
    assert first.verdict is GOOD and "will make" in first.detail
    assert [one.what for one in others] == ([] if missing else ["clock"])
    assert missing is None or not missing.exists()
    if missing:
        missing.touch()
        assert verdicts(settings) == {"database": GOOD, "clock": GOOD}
        assert missing.stat().st_size == 0


def test_the_folder_of_a_database_to_come_is_not_made(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    assert verdicts(settings) == {"database": GOOD}
    assert list(tmp_path.iterdir()) == []


def test_another_versions_database_is_bad(settings: Settings, served: Store) -> None:
    with served.writing() as tx:
        tx.connection.execute(text("UPDATE alembic_version SET version_num = '9.9'"))
    (one,) = found(settings)
    assert (one.verdict, "version 9.9" in one.detail) == (BAD, True)
    assert one.cure


def test_a_file_that_is_no_database_is_bad(tmp_path: Path) -> None:
    (tmp_path / "quarry.db").write_bytes(b"not a database" * 100)
    assert verdicts(Settings(data_dir=tmp_path)) == {"database": BAD}


def test_why_a_database_does_not_answer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By `quarry doctor`, and by what waits for it at its start."""
    url = "postgresql://me@127.0.0.1:1/name?sslmode=foo"
    (one,) = found(Settings(data_dir=tmp_path, database_url=SecretStr(url)))
    assert one.verdict is BAD and 'invalid sslmode value: "foo"' in one.detail
    answers = iter([False, True])
    with closing(Store(url)) as store:
        migrate(store, lambda: next(answers))
    assert 'invalid sslmode value: "foo"' in caplog.text


@pytest.mark.parametrize(("seconds", "verdict"), [(0, GOOD), (3, DOUBTFUL), (-3, DOUBTFUL)])
def test_a_clock_that_differs_is_doubtful(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, verdict: Verdict
) -> None:
    clock = f"clock_timestamp() + interval '{seconds} seconds'"
    monkeypatch.setitem(CLOCKS, "postgresql", clock)
    with postgres.database() as url:
        assert verdicts(Settings(data_dir=tmp_path, database_url=SecretStr(url)))["clock"] is verdict


def test_workers_of_another_version_are_doubtful(settings: Settings, served: Store) -> None:
    served.write(workers.beat, "one", 60.0, status=WorkerStatus(version=OURS))
    assert verdicts(settings)["workers"] is GOOD
    served.write(workers.beat, "two", 60.0, status=WorkerStatus(version="9.9"))
    (one,) = [one for one in found(settings) if one.what == "workers"]
    assert one.verdict is DOUBTFUL
    assert f"{OURS} on " in one.detail and "9.9 on " in one.detail


@pytest.mark.parametrize(
    ("is_migrated", "grant", "told"),
    [
        (True, None, "has no right"),
        (True, "SELECT ON ALL TABLES IN SCHEMA public", "no right to write"),
        (False, "SELECT ON ALL TABLES IN SCHEMA public", "no right to write"),
    ],
)
def test_a_role_that_lacks_rights_is_bad(
    postgres: Postgres, tmp_path: Path, is_migrated: bool, grant: str | None, told: str
) -> None:
    with postgres.database() as url:
        if is_migrated:
            owner = Store(url)
            owner.write(migration.migrate)
            owner.close()
        with postgres.admin(url.partition("@/")[2].partition("?")[0]) as admin:
            admin.execute("CREATE ROLE doctor_reads LOGIN")
            for right in ("USAGE ON SCHEMA public", grant):
                if right is not None:
                    admin.execute(f"GRANT {right} TO doctor_reads")
            try:
                role = url.replace("//quarry@", "//doctor_reads@")
                (one,) = found(Settings(data_dir=tmp_path, database_url=SecretStr(role)))
            finally:
                admin.execute("DROP OWNED BY doctor_reads")
                admin.execute("DROP ROLE doctor_reads")
    assert (one.verdict, told in one.detail) == (BAD, True)


def test_a_postgresql_that_takes_no_writes_is_bad(postgres: Postgres, tmp_path: Path) -> None:
    with postgres.database() as url:
        standing = f"{url}&options=-cdefault_transaction_read_only%3Don"
        (one,) = found(Settings(data_dir=tmp_path, database_url=SecretStr(standing)))
    assert (one.verdict, one.detail) == (BAD, "the database takes no writes")


@pytest.mark.parametrize("name", ["quarry.db", "quarry.db-shm", ""])
def test_an_sqlite_file_that_this_user_cannot_write_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = Settings(data_dir=tmp_path)
    opened = Store(settings.database())
    opened.write(migration.migrate)
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path / name)  # root may write anywhere
    (one,) = found(settings)
    opened.close()
    assert (one.verdict, one.detail) == (BAD, f"{tmp_path / name} cannot be written")


def test_an_sqlite_file_that_this_user_cannot_make_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path)
    (one,) = found(Settings(data_dir=tmp_path / "to" / "come"))
    assert (one.verdict, one.detail) == (BAD, f"{tmp_path} cannot be written")


def test_an_sqlite_file_below_what_is_not_a_folder_is_bad(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (one,) = found(Settings(data_dir=tmp_path / "data" / "of-service"))
    assert (one.verdict, one.detail) == (BAD, f"{tmp_path / 'data'} is not a folder")


@pytest.mark.parametrize(
    ("name", "target", "missing"),
    [("link", "gone/of-service.db", "gone"), ("link", "new.db", None), ("link/quarry.db", "gone", "link")],
)
def test_an_sqlite_file_behind_a_link_is_bad_if_its_folder_is_missing(
    tmp_path: Path, name: str, target: str, missing: str | None
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / target)
    (one,) = found(Settings(database_url=SecretStr(f"sqlite:///{tmp_path / name}")))
    said = f"{tmp_path / missing} is not a folder" if missing else f"{tmp_path / name} is not there"
    assert (one.verdict, one.detail.partition(":")[0]) == (BAD if missing else GOOD, said)


@pytest.mark.parametrize("check", [secret_files.admin_key, secret_files.webhook_secret])
@pytest.mark.parametrize(("secret", "verdict"), [("x" * 32, GOOD), ("x" * 31, BAD), ("", BAD), (None, BAD)])
def test_a_file_of_a_secret_is_bad_if_a_service_could_not_use_it(
    tmp_path: Path, check: Callable[[Settings], Iterator[CheckResult]], secret: str | None, verdict: Verdict
) -> None:
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret)
    settings = Settings(admin_key_file=file, webhook_secret_file=file)
    (one,) = judged("secret", lambda: check(settings))
    assert (one.verdict, "xxx" in f"{one.detail} {one.cure}") == (verdict, False)


def test_files_of_secrets_are_checked_where_a_service_reads_them(tmp_path: Path) -> None:
    settings = Settings(admin_key_file=tmp_path / "gone")
    assert set(secret_files.checks(settings)) == {"admin key"}
    assert not secret_files.checks(settings.model_copy(update={"roles": (Role.CAPTURE, Role.STORE)}))


REPO = HubTarget(repo_id="org/states", private=False)


@pytest.mark.parametrize(
    ("namespaces", "verdict"), [(None, GOOD), (("elsewhere",), BAD)], ids=["allowed", "of another namespace"]
)
def test_a_token_is_good_if_it_may_write_to_the_repository(
    tmp_path: Path, namespaces: tuple[str, ...] | None, verdict: Verdict
) -> None:
    """For what a token may do see `tests/unit/artifacts/test_repository.py`."""
    secret = tmp_path / "token"
    secret.write_text("hf_secret_word\n")
    with FakeHub() as server:
        server.add_token("hf_secret_word", Token("me", orgs={"org": "write"}))
        settings = Settings(hub_endpoint=server.url, hub_token_file=secret, hub_namespaces=namespaces)
        (one,) = judged("hub", lambda: hub.token(settings, REPO))
        assert one.verdict is verdict
        assert "hf_secret_word" not in f"{one.detail} {one.cure}"
        assert server.calls["create"] == server.calls["commit"] == 0


def test_without_a_repository_the_hub_is_not_asked(tmp_path: Path) -> None:
    for token in (None, "hf_word"):
        (one,) = judged(
            "hub",
            lambda token=token: hub.token(Settings(hub_token=token, hub_endpoint="http://127.0.0.1:9"), None),
        )
        assert one.verdict is UNSEEN and ("no token" in one.detail) == (token is None)
    (tmp_path / "empty").touch()
    (one,) = judged("hub", lambda: hub.token(Settings(hub_token_file=tmp_path / "empty"), None))
    assert one.detail.startswith("QUARRY_HUB_TOKEN_FILE is empty;")
    settings = Settings(hub_token_file=tmp_path / "missing")
    (one,) = judged("hub", lambda: hub.token(settings, None))
    assert one.verdict is BAD and "cannot be read" in one.detail


def test_a_hub_that_does_not_answer_is_bad_and_asked_twice_at_most() -> None:
    with FakeHub() as server:
        server.fail("info", Fault(status=503, times=100))
        (one,) = judged(
            "hub", lambda: hub.token(Settings(hub_token="hf_word", hub_endpoint=server.url), REPO)
        )
        assert one.verdict is BAD and "503" in one.detail
        assert server.calls["info"] == 2


@pytest.mark.parametrize("what", ["database", "hub", "model"])
def test_what_never_answers_is_left_and_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(examination, "CHECK_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = Settings(
            data_dir=tmp_path,
            database_url=SecretStr(f"postgresql+psycopg://quarry@{place}/quarry"),
            hub_endpoint=f"http://{place}",
            hub_token="hf_word",
        )
        checks = {
            "database": (store.database, settings),
            "hub": (hub.token, settings, REPO),
            "model": (engine.model, "org/model", settings, ()),
        }
        (one,) = judged_apart(what, *checks[what])
    assert (one.what, one.verdict, one.detail) == (what, BAD, "the check took more than 2 s")


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARRY_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", "doctor", *arguments],
        capture_output=True, text=True, check=False, env=environment | variables,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_says_all_of_this_machine_and_its_code_is_that_of_the_worst(
    tmp_path: Path, target: Path
) -> None:
    done = doctor(
        "--data-dir",
        str(tmp_path / "data"),
        "--model",
        str(target),
        QUARRY_MODEL_ROOTS=json.dumps([str(target)]),
        QUARRY_MIN_FREE_BYTES="0",
        PATH="",
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (any(line.startswith("bad") for line in lines), "")
    whats = [line[10:25].strip() for line in lines if not line.startswith(" ")]
    assert whats == [
        *("engine", "driver", "model", "cores", "memory", "shared memory"),
        *("disk room", "disk speed", "database", "hub"),
    ]
    driver = next(n for n, line in enumerate(lines) if line.startswith("not seen  driver"))
    assert lines[driver + 1].strip().startswith("-> ")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_what_is_bad_ends_it_with_1_and_no_secret_is_printed(tmp_path: Path) -> None:
    """1. No database answers. 2. No Hub does. 3. The files of secrets are missing."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        secrets = {
            "QUARRY_DATABASE_URL": f"postgresql+psycopg://quarry:pass-word@{place}/quarry",
            "QUARRY_HUB_TOKEN": "hf_secret_word",
            "QUARRY_HUB_ENDPOINT": f"http://{place}",
            "QUARRY_ADMIN_KEY_FILE": str(tmp_path / "none"),
            "QUARRY_WEBHOOK_SECRET_FILE": str(tmp_path / "none"),
        }
        done = doctor("--json", "--repo", "org/states", "--data-dir", str(tmp_path), **secrets)
    assert done.returncode == 1, done.stderr
    by_what = {one["what"]: one for one in map(json.loads, done.stdout.splitlines())}
    bad = {"database", "hub", "admin key", "webhook secret"}
    assert {what for what, one in by_what.items() if one["verdict"] == "bad"} >= bad
    assert all(by_what[what]["cure"] for what in bad)
    assert "pass-word" not in done.stdout + done.stderr
    assert "hf_secret_word" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("--repo", "nothing"), ("--repo", "a/b/c")])
def test_a_repository_that_cannot_be_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = doctor(*arguments)
    assert (done.returncode, "give 'namespace/name'" in done.stderr) == (2, True)
