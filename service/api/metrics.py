"""What Prometheus scrapes: read from the store each time, so that every process says the same."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.store import Store, Transaction, backlog, jobs, runs, schedules, totals, workers

PAGE_SCHEDULES = 200
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
    "stored_units": ("Units that their job's repository holds, or all consumers have.", "units_stored"),
    "evicted_bytes": ("Bytes of shards that no host keeps any more.", "bytes_gone"),
}
"""What all jobs have counted since the database was made, by the names in `Progress`."""
Row = tuple[Any, ...]
"""The values of a metric's labels, and its own."""


class JobMetrics(Collector):
    """What the whole installation has done, has to do and waits for."""

    def __init__(self, store: Store, data_dir: Path, workers_lost: Callable[[], int]) -> None:
        """Read nothing yet; `workers_lost` says how many workers beside this process do not run."""
        self._store, self._data_dir, self._workers_lost = store, data_dir, workers_lost

    def describe(self) -> list[Metric]:
        """Return nothing: without this the registry would read the store when the collector is added."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, zeros included, all of one moment."""
        with self._store.reading() as tx:
            families = [*_jobs(tx), *_workers(tx), *_hosts(tx), *_schedules(tx)]
        yield from families
        what = "Workers beside the API that end as soon as they start."
        yield gauge("lost_workers", what, [(self._workers_lost(),)])
        with suppress(OSError):
            free = shutil.disk_usage(self._data_dir).free
            yield gauge("data_free_bytes", "Free space of the data folder's disk.", [(free,)])


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    what: str,
    rows: Iterable[Row],
    *labels: str,
) -> Metric:
    family = kind(f"quarry_{name}", what, labels=labels)
    for *values, number in rows:
        family.add_metric(values, number)
    return family


gauge, counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _jobs(tx: Transaction) -> Iterator[Metric]:
    yield gauge("jobs", "Jobs by state.", jobs.counts(tx).items(), "state")
    counted = totals.totals(tx)
    for name, (what, field) in COUNTERS.items():
        yield counter(name, what, [(getattr(counted, field),)])
    what = "Units that failed for good, until their job is resumed."
    yield gauge("failed_units", what, [(counted.units_failed,)])
    what = "Seconds for which nothing has happened in a job with a task that a worker may take: the longest."
    yield gauge("oldest_runnable_task_seconds", what, backlog.runnable(tx).items(), "kind")
    what = "Age of the oldest lease of a task."
    yield gauge("oldest_leased_task_seconds", what, backlog.leased(tx).items(), "kind")


def _workers(tx: Transaction) -> Iterator[Metric]:
    yield gauge("workers", "Workers that capture.", [(len(workers.present(tx)),)])
    resting = {one.owner for one in workers.sick(tx, resting=True)}
    what = "Workers that take no unit of some jobs: their disk is full, or their engine dies over the model."
    reasons = [("disk", workers.on_full_disks(tx)), ("engine", len(resting))]
    yield gauge("waiting_workers", what, reasons, "reason")
    sick = [((one.host, str(one.pid), one.model), one) for one in workers.sick(tx)]
    labels = ("host", "pid", "model")
    what = "Deaths of a worker's engine in a row, over a model of which it has proven no unit since."
    yield gauge("worker_engine_deaths", what, [(*names, one.deaths) for names, one in sick], *labels)
    rests = [(*names, max((one.until - one.now).total_seconds(), 0.0)) for names, one in sick]
    what = "Seconds for which the worker takes no more unit of the model."
    yield gauge("worker_rest_seconds", what, rests, *labels)


def _hosts(tx: Transaction) -> Iterator[Metric]:
    held = backlog.held(tx)
    for field, what in (
        ("unstored_units", "Units captured for repositories that do not hold them yet."),
        ("unstored_bytes", "Bytes of the shards of these units."),
        ("oldest_unstored_seconds", "Time since the first of these units was committed."),
        ("scratch_used_bytes", "Bytes of shards that wait to leave, of which the host has a limit."),
        ("scratch_limit_bytes", "QUARRY_SCRATCH_BYTES of the host's workers: capture waits there."),
    ):
        values = [(one.name, one.id, getattr(one, field)) for one in held if getattr(one, field) is not None]
        yield gauge(f"host_{field}", what, values, "host", "host_id")


def _schedules(tx: Transaction) -> Iterator[Metric]:
    counts = runs.counts(tx)
    late = [(name, slots.pop("late")) for name, slots in counts.items()]
    slots = [(name, *outcome) for name, slots in counts.items() for outcome in slots.items()]
    what = "Slots of schedules that have passed, by what became of them."
    yield counter("schedule_slots", what, slots, "schedule", "outcome")
    what = "Jobs of the schedule that were made more than five minutes after their slots."
    yield counter("schedule_late_slots", what, late, "schedule")
    good: list[Row] = []
    failing: list[Row] = []
    after: str | None = ""
    while after is not None:
        page = schedules.page(tx, after=after, limit=PAGE_SCHEDULES)
        good += [(one.name, (one.last_good_at or one.created_at).timestamp()) for one in page]
        failing += [(one.name, float(one.failing)) for one in page]
        after = page[-1].name if len(page) == PAGE_SCHEDULES else None
    what = "Unix time at which a job of the schedule was last completed, or the schedule was made."
    yield gauge("schedule_last_good_timestamp_seconds", what, good, "schedule")
    yield gauge("schedule_failing", "1 if the last slot has no completed job.", failing, "schedule")
