"""Checks the database as workers see it: its tables and clock, and the versions of its workers."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

from schemas.worker import HostView
from service.doctor.check_result import CheckResult, Verdict
from service.errors import StoreUnavailable
from service.installed import DISTRIBUTION
from service.settings import Settings

MAX_SKEW = timedelta(seconds=1)


def database(settings: Settings) -> Iterator[CheckResult]:
    """Check the database without leaving a trace in it. Raises StoreUnavailable, OptionRefused."""
    from service.store import Store, hosts, migration
    from service.store.database import check_places, check_writable, missing_file

    url = settings.database()
    if (missing := missing_file(url)) is not None:
        nearest = next(place for place in missing.parents if os.path.lexists(place))
        if missing.is_symlink():  # SQLite makes the file that it leads to, but no folder
            nearest = Path(os.path.realpath(missing)).parent
        check_places(nearest)
        if not nearest.is_dir():
            raise StoreUnavailable(f"{nearest} is not a folder", cure="name another place for the database")
        yield CheckResult("database", Verdict.GOOD, f"{missing} is not there: 'quarry serve' will make it")
        return
    with closing(Store(url, read_only=True)) as store, _explained():
        with store.reading() as tx:
            asked = datetime.now(UTC)
            now, answered = tx.now, datetime.now(UTC)
            check_writable(tx)
            if migration.is_new(tx):
                yield CheckResult("database", Verdict.GOOD, "empty: 'quarry serve' will make its tables")
            else:
                migration.check(tx)
                yield CheckResult("database", Verdict.GOOD, "answers, with the tables of this version")
                yield _workers(hosts.views(tx))
        yield _clock(max(asked - now, now - answered, timedelta()))


@contextmanager
def _explained() -> Iterator[None]:
    from service.store.database import said_by_driver

    try:
        yield
    except StoreUnavailable as error:
        error.detail += said_by_driver(error)
        raise


def _clock(skew: timedelta) -> CheckResult:
    """Judge the clock skew. It is never bad: leases depend only on the database's clock."""
    detail = f"{skew.total_seconds():.1f} s from the database's"
    cure = "run an NTP client: certificates, logs and `min_age_s` of sources are by this machine's clock"
    return CheckResult("clock", Verdict.DOUBTFUL if skew > MAX_SKEW else Verdict.GOOD, detail, cure)


def _workers(views: Sequence[HostView]) -> CheckResult:
    where = defaultdict(set)
    for host in views:
        for worker in host.workers:
            where[worker.version].add(host.name)
    ours = version(DISTRIBUTION)
    detail = "; ".join(f"{one} on {', '.join(sorted(names))}" for one, names in sorted(where.items()))
    verdict = Verdict.GOOD if where.keys() <= {ours} else Verdict.DOUBTFUL
    cure = "install one version everywhere: one that has other tables takes no work"
    return CheckResult("workers", verdict, f"this is Quarry {ours}; workers: {detail or 'none'}", cure)
