"""Writes the tables of `docs/observability.md`: python -m tests.support.metrics_page.

They are of what is really exposed: the metrics of the API's process and those of a worker's.
"""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import REGISTRY

from service.api.metrics import JobMetrics
from service.publish import storing  # noqa: F401 - as in a worker: all that counts is imported
from service.store import Store, migration
from service.work import meters
from service.worker import run_worker  # noqa: F401 - the same

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
HEAD = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"


class Row(NamedTuple):
    """A metric as Prometheus knows it."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def of_api() -> list[Row]:
    """Return what the API says of a new installation."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/quarry.db")
        store.write(migration.migrate)
        families = list(JobMetrics(store, Path(folder), lambda: 0).collect())
        store.close()
    return [_row(one.name, one.type, one._labelnames, one.documentation) for one in families]


def of_worker() -> list[Row]:
    """Return what a worker process says of itself; vLLM and Python have their own beside it."""
    rows = []
    for collector in dict.fromkeys(REGISTRY._names_to_collectors.values()):
        if isinstance(collector, meters.Phases | meters.Ranks):
            rows += [
                _row(one.name, one.type, one._labelnames, one.documentation) for one in collector.collect()
            ]
        elif getattr(collector, "_name", "").startswith(meters.PREFIX):
            rows.append(
                _row(collector._name, collector._type, collector._labelnames, collector._documentation)
            )
    return rows


def _row(name: str, kind: str, labels: Iterable[str], what: str) -> Row:
    return Row(name + "_total" * (kind == "counter"), kind, tuple(labels), what)


def with_tables(page: str) -> str:
    """Return the page with both tables as they are now."""
    for mark, rows in (("api", of_api()), ("worker", of_worker())):
        lines = (f"| `{r.name}` | {r.type} | {', '.join(r.labels)} | {r.help} |\n" for r in sorted(rows))
        table = f"<!-- {mark} -->\n\n{HEAD}{''.join(lines)}\n<!-- end -->"
        page, count = re.subn(f"<!-- {mark} -->.*?<!-- end -->", lambda _: table, page, flags=re.DOTALL)  # noqa: B023
        assert count == 1, mark
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
