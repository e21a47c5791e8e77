"""A worker process's own metrics, by stage, and its `/metrics` endpoint.

Everything is in prometheus_client's global registry, to which vLLM's front end also adds its metrics. The
counts belong to the process and continue across engines.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.dataset.entries import ShardEntry
from schemas.receipts import RankLoad
from service.errors import OptionRefused
from service.settings import Settings

PREFIX = "quarry_worker"


class Stage:
    """Counts what has passed a stage, in each of `units`."""

    def __init__(self, name: str, what: str, *units: str) -> None:
        """Register a counter for each unit, at 0."""
        self._counters = {
            unit: Counter(f"{PREFIX}_{name}_{unit}", f"{unit.capitalize()} {what}.") for unit in units
        }

    def add(self, **amounts: float) -> None:
        """Add to the counters, by unit."""
        for unit, amount in amounts.items():
            self._counters[unit].inc(amount)

    def add_shards(self, shards: Iterable[ShardEntry], **amounts: int) -> None:
        """Add the samples, tokens and bytes of shards."""
        for entry in shards:
            self.add(samples=entry.rows, tokens=entry.tokens, bytes=entry.bytes)
        self.add(**amounts)


class Phases(Collector):
    """A counter of the seconds spent in each state, including the current one."""

    def __init__(self, name: str, what: str, label: str, states: tuple[str, ...]) -> None:
        self._name, self._what, self._label = f"{PREFIX}_{name}", what, label
        self._lock = threading.Lock()
        self._spent_s = dict.fromkeys(states, 0.0)
        self._state, self._since = states[0], time.monotonic()
        REGISTRY.register(self)

    def enter(self, state: str | None = None) -> None:
        """Enter another state, or stay in the current one if none is given."""
        with self._lock:
            now = time.monotonic()
            self._spent_s[self._state] += now - self._since
            self._state, self._since = state or self._state, now

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        self.enter()
        family = CounterMetricFamily(self._name, self._what, labels=[self._label])
        for state, seconds in self._spent_s.items():
            family.add_metric([state], seconds)
        yield family


LOADS: dict[int, RankLoad] = {}
"""The last load that each rank of the engine reported; a new engine's ranks start from zero."""
COUNTED = frozenset({"drained_samples", "drained_tokens", "drained_bytes", "writer_busy_seconds"})


class Ranks(Collector):
    """`LOADS` by rank; the names in `COUNTED` are counters, the others gauges."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        loads = list(LOADS.values())  # the worker's loop may change it meanwhile
        for name in RankLoad.model_fields.keys() - {"kind", "rank"}:
            family_of = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
            what = RankLoad.model_fields[name].description
            family = family_of(f"{PREFIX}_{name}", str(what), labels=["rank"])
            for load in loads:
                family.add_metric([str(load.rank)], getattr(load, name))
            yield family


REGISTRY.register(Ranks())

PREFILLED = Stage("prefilled", "that the engine has computed", "samples", "tokens")
SEALED = Stage("sealed", "in shards that are durable on this host", "samples", "tokens", "bytes")
PROVEN = Stage("proven", "in shards that were read back and proven", "samples", "tokens", "bytes")
COMMITTED = Stage("committed", "that are committed", "units", "samples", "tokens", "bytes")
REJECTED = Stage("rejected", "of committed units that are in no shard", "samples")
UPLOADED = Stage("uploaded", "of files that were sent to the Hub", "bytes")
STORED = Stage("stored", "that their job's repository holds, before it is published", "units", "bytes")
EVICTED = Stage("evicted", "of stored shards that were deleted from this host", "bytes")

ENGINE = Phases(
    "engine_seconds",
    "Seconds by the engine's state; idle: it has no row of a job.",
    "state",
    ("none", "starting", "idle", "busy"),
)
WAITS = Phases(
    "wait_seconds",
    "Seconds by why no further unit is taken: engine (it has enough), proof (too many wait for theirs), work "
    "(there is none), disk (QUARRY_SCRATCH_BYTES is taken), start (another engine and its canary), alone "
    "(one on which engines died runs alone), database (it is away), stop; none: one is being taken.",
    "reason",
    ("none", "engine", "proof", "work", "disk", "start", "alone", "database", "stop"),
)


@contextmanager
def served(settings: Settings) -> Iterator[None]:
    """Serve `GET /metrics` within the context if a port is set. Raises OptionRefused."""
    port, host = settings.worker_metrics_port, settings.worker_metrics_host
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, host)
    except (OSError, OverflowError) as error:
        detail = f"{host}:{port} cannot be listened on: {error}"
        cure = "name a free port; workers of one node that are started apart need a port each"
        raise OptionRefused(detail, field="QUARRY_WORKER_METRICS_PORT", cure=cure) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
