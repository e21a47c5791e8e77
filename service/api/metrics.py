"""What Prometheus scrapes: read from the store each time, so that every process says the same."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.job import JobState
from service.store import Store, jobs, runs, schedules, workers

PAGE_SCHEDULES = 200


class JobMetrics(Collector):
    """Jobs by state, and what all jobs together have planned and written."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[Metric]:
        """Return nothing: without this the registry would read the store when the collector is added."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge for the states, zeros included, and a counter for each total."""
        counts = self._store.read(jobs.counts)
        by_state = GaugeMetricFamily("quarry_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            by_state.add_metric([state.value], counts.get(state, 0))
        yield by_state
        totals = self._store.read(jobs.totals)
        for name, what, value in (
            ("samples_written", "Samples in committed shards.", totals.samples_written),
            ("samples_rejected", "Samples that are in no shard, with a reason.", totals.samples_rejected),
            ("tokens_written", "Tokens in committed shards.", totals.tokens_written),
            ("bytes_written", "Bytes of committed shards.", totals.bytes_written),
            ("units_done", "Units committed.", totals.units_done),
            ("units_failed", "Units that failed for good.", totals.units_failed),
        ):
            yield CounterMetricFamily(f"quarry_{name}", what, value=value)
        yield from self._workers()
        yield from self._schedules()

    def _workers(self) -> Iterator[Metric]:
        present = self._store.read(workers.present)
        yield GaugeMetricFamily("quarry_workers", "Workers that capture.", value=len(present))
        labels = ["host", "pid", "model"]
        what = "Deaths of a worker's engine in a row, over a model of which it has proven no unit since."
        deaths = GaugeMetricFamily("quarry_worker_engine_deaths", what, labels=labels)
        what = "Seconds for which the worker takes no more unit of the model."
        waits = GaugeMetricFamily("quarry_worker_rest_seconds", what, labels=labels)
        for sickness in self._store.read(workers.sick):
            names = [sickness.host, str(sickness.pid), sickness.model]
            deaths.add_metric(names, sickness.deaths)
            waits.add_metric(names, max((sickness.until - sickness.now).total_seconds(), 0.0))
        yield from (deaths, waits)

    def _schedules(self) -> Iterator[Metric]:
        what = "Slots of schedules that have passed, by what became of them."
        slots = CounterMetricFamily("quarry_schedule_slots", what, labels=["schedule", "outcome"])
        what = "Unix time at which a job of the schedule was last completed, or the schedule was made."
        last_good = GaugeMetricFamily(
            "quarry_schedule_last_good_timestamp_seconds", what, labels=["schedule"]
        )
        failing = GaugeMetricFamily(
            "quarry_schedule_failing", "1 if the last slot has no completed job.", labels=["schedule"]
        )
        what = "Jobs of the schedule that were made more than five minutes after their slots."
        late = CounterMetricFamily("quarry_schedule_late_slots", what, labels=["schedule"])
        for name, counts in self._store.read(runs.counts).items():
            late.add_metric([name], counts.pop("late"))
            for outcome, number in counts.items():
                slots.add_metric([name, outcome], number)
        after: str | None = ""
        while after is not None:
            page = self._store.read(schedules.page, after=after, limit=PAGE_SCHEDULES)
            for schedule in page:
                last = schedule.last_good_at or schedule.created_at
                last_good.add_metric([schedule.name], last.timestamp())
                failing.add_metric([schedule.name], float(schedule.failing))
            after = page[-1].name if len(page) == PAGE_SCHEDULES else None
        yield from (slots, last_good, failing, late)
