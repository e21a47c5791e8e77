"""What Prometheus scrapes: read from the store each time, so that every process says the same."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.job import JobState
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
            families = [*_jobs(tx), *_tasks(tx), *_workers(tx), *_hosts(tx), *_schedules(tx)]
        what = "Workers beside the API that end as soon as they start."
        families.append(GaugeMetricFamily("quarry_lost_workers", what, value=self._workers_lost()))
        with suppress(OSError):
            what, free = "Free space of the data folder's disk.", shutil.disk_usage(self._data_dir).free
            families.append(GaugeMetricFamily("quarry_data_free_bytes", what, value=free))
        yield from families


def _jobs(tx: Transaction) -> Iterator[Metric]:
    counts = jobs.counts(tx)
    by_state = GaugeMetricFamily("quarry_jobs", "Jobs by state.", labels=["state"])
    for state in JobState:
        by_state.add_metric([state.value], counts.get(state, 0))
    yield by_state
    counted = totals.totals(tx)
    for name, (what, field) in COUNTERS.items():
        yield CounterMetricFamily(f"quarry_{name}", what, value=getattr(counted, field))
    what = "Units that failed for good, until their job is resumed."
    yield GaugeMetricFamily("quarry_failed_units", what, value=counted.units_failed)


def _tasks(tx: Transaction) -> Iterator[Metric]:
    what = "Seconds for which nothing has happened in a job with a task that a worker may take: the longest."
    waiting = GaugeMetricFamily("quarry_oldest_runnable_task_seconds", what, labels=["kind"])
    what = "Age of the oldest lease of a task."
    taken = GaugeMetricFamily("quarry_oldest_leased_task_seconds", what, labels=["kind"])
    for family, ages in ((waiting, backlog.runnable(tx)), (taken, backlog.leased(tx))):
        for kind, seconds in ages.items():
            family.add_metric([kind.value], seconds)
        yield family


def _workers(tx: Transaction) -> Iterator[Metric]:
    yield GaugeMetricFamily("quarry_workers", "Workers that capture.", value=len(workers.present(tx)))
    sick = workers.sick(tx)
    what = "Workers that take no unit of some jobs: their disk is full, or their engine dies over the model."
    waiting = GaugeMetricFamily("quarry_waiting_workers", what, labels=["reason"])
    waiting.add_metric(["disk"], workers.on_full_disks(tx))
    waiting.add_metric(["engine"], len({one.owner for one in workers.sick(tx, resting=True)}))
    labels = ["host", "pid", "model"]
    what = "Deaths of a worker's engine in a row, over a model of which it has proven no unit since."
    deaths = GaugeMetricFamily("quarry_worker_engine_deaths", what, labels=labels)
    what = "Seconds for which the worker takes no more unit of the model."
    rests = GaugeMetricFamily("quarry_worker_rest_seconds", what, labels=labels)
    for sickness in sick:
        names = [sickness.host, str(sickness.pid), sickness.model]
        deaths.add_metric(names, sickness.deaths)
        rests.add_metric(names, max((sickness.until - sickness.now).total_seconds(), 0.0))
    yield from (waiting, deaths, rests)


def _hosts(tx: Transaction) -> Iterator[Metric]:
    labels = ["host", "host_id"]
    families = {
        name: GaugeMetricFamily(f"quarry_host_{name}", what, labels=labels)
        for name, what in (
            ("unstored_units", "Units captured for repositories that do not hold them yet."),
            ("unstored_bytes", "Bytes of the shards of these units."),
            ("oldest_unstored_seconds", "Time since the first of these units was committed."),
            ("scratch_used_bytes", "Bytes of shards that wait to leave, of which the host has a limit."),
            ("scratch_limit_bytes", "QUARRY_SCRATCH_BYTES of the host's workers: capture waits there."),
        )
    }
    for host in backlog.held(tx):
        values = (host.units, host.bytes, host.oldest_s, host.used_bytes, host.limit_bytes)
        for family, value in zip(families.values(), values, strict=True):
            if value is not None:
                family.add_metric([host.name, host.id], value)
    yield from families.values()


def _schedules(tx: Transaction) -> Iterator[Metric]:
    what = "Slots of schedules that have passed, by what became of them."
    slots = CounterMetricFamily("quarry_schedule_slots", what, labels=["schedule", "outcome"])
    what = "Unix time at which a job of the schedule was last completed, or the schedule was made."
    last_good = GaugeMetricFamily("quarry_schedule_last_good_timestamp_seconds", what, labels=["schedule"])
    what = "1 if the last slot has no completed job."
    failing = GaugeMetricFamily("quarry_schedule_failing", what, labels=["schedule"])
    what = "Jobs of the schedule that were made more than five minutes after their slots."
    late = CounterMetricFamily("quarry_schedule_late_slots", what, labels=["schedule"])
    for name, counts in runs.counts(tx).items():
        late.add_metric([name], counts.pop("late"))
        for outcome, number in counts.items():
            slots.add_metric([name, outcome], number)
    after: str | None = ""
    while after is not None:
        page = schedules.page(tx, after=after, limit=PAGE_SCHEDULES)
        for schedule in page:
            last = schedule.last_good_at or schedule.created_at
            last_good.add_metric([schedule.name], last.timestamp())
            failing.add_metric([schedule.name], float(schedule.failing))
        after = page[-1].name if len(page) == PAGE_SCHEDULES else None
    yield from (slots, last_good, failing, late)
