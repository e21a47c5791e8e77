"""The Prometheus metrics, read from the store at each scrape, so that every process reports the same."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.worker import HostView
from service.store import Store, Transaction, backlog, hosts, jobs, schedules, totals, workers

COUNTERS = {
    "planned_samples": ("Samples that were planned.", "samples_planned"),
    "planned_tokens": ("Tokens of planned units.", "tokens_planned"),
    "planned_units": ("Units that were planned.", "units_planned"),
    "known_samples": ("Samples that earlier runs of their schedule had written.", "samples_known"),
    "rejected_samples": ("Samples that are in no shard, with a reason.", "samples_rejected"),
    "committed_samples": ("Samples in committed shards: proven.", "samples_written"),
    "committed_tokens": ("Tokens in committed shards.", "tokens_written"),
    "committed_bytes": ("Bytes of committed shards.", "bytes_written"),
    "committed_units": ("Units committed.", "units_done"),
    "failed_units": ("Units that failed, counted again where one fails after a resume.", "units_failed"),
    "stored_units": ("Units that their job's repository holds, or all consumers have.", "units_stored"),
    "evicted_bytes": ("Bytes of shards that no host keeps any more.", "bytes_gone"),
}
"""Totals over all jobs since the database was created: description and field of `Progress`, by metric."""
Row = tuple[Any, ...]
"""The values of a metric's labels, then the metric's own."""


class JobMetrics(Collector):
    """What the whole installation has done, has still to do, and waits for."""

    def __init__(self, store: Store, data_dir: Path, workers_lost: Callable[[], int]) -> None:
        """Read nothing yet; `workers_lost` returns how many of this process's workers are not running."""
        self._store, self._data_dir, self._workers_lost = store, data_dir, workers_lost

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, zeros included; those of the store are from one snapshot."""
        with self._store.reading() as tx:
            views = hosts.views(tx)
            families = [*_jobs(tx), *_workers(tx, views), *_hosts(views, tx.now), *_schedules(tx)]
        yield from families
        what = "Workers of this service that keep exiting."
        yield gauge("lost_workers", what, [(self._workers_lost(),)])
        with suppress(OSError):
            free = shutil.disk_usage(self._data_dir).free
            yield gauge("data_free_bytes", "Free space of the data folder's disk.", [(free,)])


def gauge(name: str, what: str, rows: Iterable[Row], *labels: str) -> Metric:
    """Return a gauge with a series for each row."""
    family = GaugeMetricFamily(f"quarry_{name}", what, labels=labels)
    for *values, number in rows:
        family.add_metric(values, number)
    return family


def _jobs(tx: Transaction) -> Iterator[Metric]:
    yield gauge("jobs", "Jobs by state.", jobs.counts(tx).items(), "state")
    counted = totals.totals(tx)
    for name, (what, field) in COUNTERS.items():
        yield CounterMetricFamily(f"quarry_{name}", what, value=getattr(counted, field))
    what = "Longest time since the last event of a job that has a task for a worker to take."
    yield gauge("oldest_runnable_task_seconds", what, backlog.runnable(tx).items(), "kind")
    what = "Age of the oldest lease, by kind of task and by the worker, or its process, that holds it."
    leases = [(*of, age) for of, age in backlog.leased(tx).items()]
    yield gauge("oldest_leased_task_seconds", what, leases, "kind", "worker")


def _workers(tx: Transaction, views: Sequence[HostView]) -> Iterator[Metric]:
    yield gauge("workers", "Workers that capture.", [(sum(len(host.workers) for host in views),)])
    sick = sorted(workers.sick(tx), key=lambda one: one.deaths)
    # Of two checkpoints with the same name, the higher number wins.
    deaths = {(one.owner, one.host, one.host_id, one.model): one.deaths for one in sick}
    what = "Consecutive deaths of a worker's engine on a model not captured since; 0: it refuses a job."
    labels = ("worker", "host", "host_id", "model")
    yield gauge("worker_engine_deaths", what, [(*of, number) for of, number in deaths.items()], *labels)


def _hosts(views: Sequence[HostView], now: datetime) -> Iterator[Metric]:
    for name, field, what in (
        ("unstored_units", "units_to_store", "Units captured for repositories that do not hold them yet."),
        ("unstored_bytes", "bytes_to_store", "Bytes of the shards of units to store."),
        ("scratch_used_bytes", None, "Bytes of shards to be stored or consumed, if there is a limit."),
        ("scratch_limit_bytes", None, "QUARRY_SCRATCH_BYTES of the host's workers, at which capture waits."),
    ):
        said = ((one, getattr(one, field or name)) for one in views)
        rows = [(one.name, one.id, number) for one, number in said if number is not None]
        yield gauge(f"host_{name}", what, rows, "host", "host_id")
    ages = [(one.name, one.id, (now - (one.to_store_since or now)).total_seconds()) for one in views]
    what = "Time since the oldest unit to store was committed, of jobs that are still capturing."
    yield gauge("host_oldest_unstored_seconds", what, ages, "host", "host_id")


def _schedules(tx: Transaction) -> Iterator[Metric]:
    health = schedules.health(tx)
    what = "Unix time at which a job of the schedule was last completed, or the schedule was made."
    last_good = [(name, at.timestamp()) for name, at, _ in health]
    yield gauge("schedule_last_good_timestamp_seconds", what, last_good, "schedule")
    failing = [(name, float(is_failing)) for name, _, is_failing in health]
    said = "1 if the last slot has no job, or one that will not complete by itself."
    yield gauge("schedule_failing", said, failing, "schedule")
