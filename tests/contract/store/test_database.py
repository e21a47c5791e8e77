"""What the databases are told: durability, foreign keys, migrations at once; and their errors as ours."""

import multiprocessing
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError

import service.migrations
from service.errors import DiskFull, OptionRefused, StoreUnavailable
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration
from service.store.tables import METADATA, UNIT
from tests.support.pg import Postgres
from tests.support.store_cases import a_request, job_id, submit


def test_the_migrations_make_the_tables_of_the_code(url: str) -> None:
    store, database = Store(url), Store(url)
    store.write(migration.migrate)
    with database.reading() as tx:
        assert compare_metadata(MigrationContext.configure(tx.connection), METADATA) == []
    store.close()
    database.close()


def test_the_first_tables_are_written_out_before_a_second_migration_is_added() -> None:
    """They would come with what the second one adds."""
    first, *later = sorted(Path(service.migrations.__file__).parent.glob("versions/0*.py"))
    assert not later or "METADATA" not in first.read_text()


def test_migrating_again_keeps_everything(store: Store) -> None:
    row = submit(store)
    store.write(migration.migrate)
    assert store.read(jobs.job, row.id) == row
    store.read(migration.check)


def test_a_database_without_tables_is_not_ready(url: str) -> None:
    empty = Store(url)
    with pytest.raises(StoreUnavailable) as refused:
        empty.read(migration.check)
    assert refused.value.cure
    empty.write(migration.migrate)
    empty.read(migration.check)
    empty.close()


def migrate_and_submit(url: str, number: int) -> None:
    opened = Store(url)
    opened.write(migration.migrate)
    opened.write(jobs.submit, NewJob.of(job_id(number), f"key-{number}", a_request()))
    opened.close()


@pytest.mark.slow
def test_processes_that_start_at_once_migrate_once(url: str) -> None:
    spawning = multiprocessing.get_context("spawn")
    processes = [spawning.Process(target=migrate_and_submit, args=(url, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    after = Store(url)
    assert {row.id for row in after.read(jobs.page)[0]} == {job_id(number) for number in range(3)}
    after.close()


def test_a_commit_survives_power_loss_and_a_stopped_process_holds_no_lock_for_ever(
    store: Store, database: Store
) -> None:
    settings = {
        "sqlite": {
            "PRAGMA journal_mode": "wal",
            "PRAGMA synchronous": 2,
            "PRAGMA foreign_keys": 1,
            "PRAGMA busy_timeout": 30_000,
        },
        "postgresql": {
            "SHOW idle_in_transaction_session_timeout": "30s",
            "SHOW lock_timeout": "30s",
        },
    }
    with database.reading() as tx:
        for ask, expected in settings[tx.connection.dialect.name].items():
            assert tx.connection.scalar(text(ask)) == expected


@pytest.mark.parametrize(("given", "kept"), [("off", "on"), ("remote_write", "remote_write")])
def test_a_postgresql_that_answers_before_a_commit_is_durable_is_told_to_wait(
    postgres: Postgres, given: str, kept: str
) -> None:
    with postgres.database() as url:
        store = Store(f"{url}&options=-csynchronous_commit%3D{given}")
        with store.reading() as tx:
            assert tx.connection.scalar(text("SHOW synchronous_commit")) == kept
        store.close()


def test_a_row_without_its_job_is_refused(store: Store, database: Store) -> None:
    stray = dict.fromkeys(("unit", "num_samples", "num_tokens"), 0)
    stray |= {"job_id": job_id(9), "plan_sha256": "what a user sent"}
    with pytest.raises(IntegrityError) as refused, database.writing() as tx:
        tx.connection.execute(insert(UNIT).values(stray))
    assert "what a user sent" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_pool_that_is_used_up_is_unavailable(store: Store, database: Store) -> None:
    pool = database._engine.pool
    pool._timeout = 0
    with ExitStack() as held, pytest.raises(StoreUnavailable) as refused:
        for _ in range(1 + pool.size() + pool._max_overflow):
            held.enter_context(database.reading())
    assert refused.value.cure


def test_a_reader_sees_the_last_commit_while_a_writer_is_at_work(store: Store, database: Store) -> None:
    submit(store, 1)
    with database.writing() as tx:
        jobs.submit(tx, NewJob.of(job_id(2), "key-2", a_request()))
        assert [row.id for row in store.read(jobs.page)[0]] == [job_id(1)]
    assert [row.id for row in store.read(jobs.page)[0]] == [job_id(2), job_id(1)]


def test_a_database_that_cannot_grow_says_that_the_disk_is_full(store: Store, database: Store) -> None:
    with pytest.raises(DiskFull) as refused, database.writing() as tx:
        if tx.connection.dialect.name == "sqlite":
            pages = tx.connection.scalar(text("PRAGMA page_count"))
            tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            jobs.submit(tx, NewJob.of(job_id(1), "key", a_request("x" * 100_000)))
        else:
            tx.connection.exec_driver_sql("DO $$ BEGIN RAISE 'full' USING ERRCODE = 'disk_full'; END $$")
    assert refused.value.cure
    assert store.read(jobs.page) == ([], None)
    submit(store, 1)


def test_a_database_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}", f"postgresql+psycopg://quarry@/none?host={tmp_path}"):
        absent = Store(url)
        with pytest.raises(StoreUnavailable) as refused:
            absent.read(jobs.page)
        assert refused.value.cure
        absent.close()


@pytest.mark.parametrize("damage", ["head", "pages"])
def test_a_database_that_cannot_be_read_is_unavailable(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "quarry.db"
    damaged = Store(f"sqlite:///{file}")
    damaged.write(migration.migrate)
    submit(damaged)
    damaged.close()
    content = bytearray(file.read_bytes())
    begin, end = {"head": (0, 100), "pages": (4096, len(content))}[damage]
    content[begin:end] = b"\xa5" * (end - begin)
    file.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="cannot be read") as refused:
        damaged.write(jobs.submit, NewJob.of(job_id(2), "key-2", a_request()))
    assert refused.value.cure
    damaged.close()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_connection_that_dies_is_unavailable_once_and_then_replaced(
    store: Store, database: Store, postgres: Postgres
) -> None:
    with pytest.raises(StoreUnavailable), database.writing() as tx:
        jobs.submit(tx, NewJob.of(job_id(1), "key-1", a_request()))
        server = tx.connection.scalar(text("SELECT pg_backend_pid()"))
        with postgres.admin() as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 10000)", (server,))
        tx.connection.execute(text("SELECT 1"))
    assert store.read(jobs.page) == ([], None)
    with database.writing() as tx:
        jobs.submit(tx, NewJob.of(job_id(1), "key-1", a_request()))
    assert len(store.read(jobs.page)[0]) == 1


@pytest.mark.parametrize(
    "given",
    ["nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:", "postgresql+asyncpg://host/name"],
)
def test_a_database_that_could_lose_a_job_is_refused_by_name(given: str) -> None:
    with pytest.raises(OptionRefused) as refused:
        Store(given)
    assert refused.value.field == "database_url"
    assert refused.value.cure


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://me@one:1,two:2/name",
        "postgresql://me:one@se:cret@host/name",
        "postgresql://me@/name?host=one:1&host=two:x",
        "postgresql://me@/name?host=one,two&port=1,2,3",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_and_nothing_of_it_quoted(given: str) -> None:
    with pytest.raises(OptionRefused, match="the database URL cannot be read") as refused:
        Store(given)
    assert "host=two:5432" in (refused.value.cure or "")
    assert refused.value.__suppress_context__ and refused.value.__cause__ is None


@pytest.mark.parametrize("option", ["sslmod=require", "autocommit=1", "xxx@host/name=y"])
def test_an_option_that_is_not_of_libpq_is_refused(option: str) -> None:
    with pytest.raises(OptionRefused, match="libpq does not know") as refused:
        Store(f"postgresql://me@host/name?{option}")
    assert "xxx" not in str(refused.value.problem())
    Store("postgresql://me@/name?host=one:1&host=two:2&sslmode=require&options=-cwork_mem%3D8MB").close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("postgresql://me@127.0.0.1:1/name?connect_timeout=abc", "bad value for connect_timeout"),
        ("postgresql://me@127.0.0.1:1/name?sslmode=disable&sslmode=require", "twice"),
        (f"postgresql://me@{'h' * 300}:1/name", "cannot be read"),
        ("postgresql://me@one..two:1/name", "cannot be read"),
        ("postgresql://m\udce9@127.0.0.1:1/name", "cannot be read"),
        ("postgresql://me%00@127.0.0.1:1/name", "cannot be read"),
        ("sqlite:////no/such/qu%00arry.db", "cannot be read"),
        ("sqlite:////no/such/quarry.db?timeout=abc", "no options"),
        ("sqlite:////no/such/quarry.db?timeout=1&timeout=2", "no options"),
        ("sqlite:////no/such/quarry.db?mode=memory&uri=true", "no options"),
        ("sqlite:////no/such/what?/quarry.db", "no options"),
    ],
)
def test_a_url_of_which_the_driver_can_make_nothing_is_refused(
    given: str, said: str, read_only: bool
) -> None:
    """The driver reads some of it only when it connects."""
    with (
        pytest.raises(OptionRefused, match=said) as refused,
        closing(Store(given, read_only=read_only)) as it,
    ):
        it.read(migration.is_new)
    assert refused.value.field == "database_url" and refused.value.cure


def test_the_folder_of_a_new_database_is_made(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'a%b' / 'c' / 'quarry.db'}")
    store.write(migration.migrate)
    assert submit(store) == store.read(jobs.job, job_id(1))
    store.close()


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "a?b", "a#b"])
def test_the_database_is_in_the_data_folder_whatever_that_is_called(tmp_path: Path, name: str) -> None:
    with closing(Store(Settings(data_dir=tmp_path / name).database())) as it:
        assert it.read(migration.is_new)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "quarry.db").exists()
