"""What a worker counts: time goes on in the state that it is in, and a port has one worker."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from service.errors import OptionRefused
from service.settings import Settings
from service.work import meters


def spent(phases: meters.Phases) -> dict[str, float]:
    (family,) = phases.collect()
    return {sample.labels["state"]: sample.value for sample in family.samples}


def test_time_passes_in_one_state_and_also_in_one_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(meters, "REGISTRY", CollectorRegistry())
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: now[0]))
    phases = meters.Phases("seconds", "Seconds.", "state", ("none", "idle", "busy"))
    seen = []
    for state, seconds in (("none", 5.0), ("busy", 4.0), ("busy", 1.0), ("none", 2.0)):
        phases.enter(state)
        now[0] += seconds
        seen.append(spent(phases))
    assert [tuple(one.values()) for one in seen] == [(5, 0, 0), (5, 0, 4), (5, 0, 5), (7, 0, 5)]


def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(data_dir=tmp_path, worker_metrics_port=port)
        told = f"127.0.0.1:{port} cannot be listened on"
        with pytest.raises(OptionRefused, match=told) as refused, meters.served(settings):
            pass
    assert refused.value.field == "QUARRY_WORKER_METRICS_PORT"


def test_each_worker_of_a_node_has_a_port_of_its_own_if_any_has_one() -> None:
    settings = Settings(worker_metrics_port=9464)
    assert [settings.of_worker(number).worker_metrics_port for number in range(3)] == [9464, 9465, 9466]
    assert Settings().of_worker(1).worker_metrics_port is None
