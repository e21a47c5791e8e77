"""deploy/observability as shipped: Debian's Prometheus on a real service and its workers, a job behind it."""

import subprocess
import time
from pathlib import Path

import httpx2
import pytest
import yaml

from schemas.job import JobState
from service.client import Quarry
from tests.support.ports import free_port
from tests.support.prometheus import (
    FOLDER,
    ask,
    configure,
    dashboard_queries,
    missing,
    names_in,
    running_prometheus,
)
from tests.support.service_process import body_of, serving
from tests.support.tiny_model import random_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.outside,
    pytest.mark.skipif(missing() != [], reason=f"not installed: {', '.join(missing())} (prometheus)"),
]

KEY = "a" * 40
PATIENCE_S = 120.0
RULES = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ONLY_IN_TROUBLE = {"quarry_worker_engine_deaths", "ALERTS"}
"""Series that a service in which all is well does not have."""
ONLY_AT_WORK = "quarry_oldest_leased_task_seconds"
"""Is there while something is worked on, which a scrape may miss: the tests of the rules have it."""


def is_empty(prometheus: httpx2.Client, query: str) -> bool:
    """Say whether a query has no answer, or none that is a number."""
    return all(one["value"][1] == "NaN" for one in ask(prometheus, query))


@pytest.mark.parametrize("arguments", [("rules", "rules.yml"), ("config", "--syntax-only", "prometheus.yml")])
def test_promtool_finds_nothing_in_the_files_as_shipped(arguments: tuple[str, ...]) -> None:
    subprocess.run(["promtool", "check", *arguments], cwd=FOLDER, check=True)


def test_alerts_come_in_trouble_and_not_without() -> None:
    test = Path(__file__).with_name("observability_rules.yml")
    subprocess.run(["promtool", "test", "rules", test], check=True)
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    assert {name for name in alerts if f'"{name}"' in test.read_text()} == alerts


def test_every_query_of_the_dashboard_and_the_rules_is_answered_after_a_job(tmp_path: Path) -> None:
    """1. A service with keys and two workers. 2. Prometheus scrapes it. 3. A job runs. 4. All is asked.

    vLLM's own series are those of `test_what_vllm_counts_is_passed_on`.
    """
    target = random_target(tmp_path / "model", layers=4, hidden=64)
    first, port = free_port(following=1), free_port()
    (tmp_path / "admin").write_text(KEY)
    settings = {
        "QUARRY_ADMIN_KEY_FILE": str(tmp_path / "admin"),
        "QUARRY_WORKER_METRICS_PORT": str(first),
        "QUARRY_SCRATCH_BYTES": str(2**30),
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        serving(tmp_path / "data", "--workers", "2", **settings) as service,
        httpx2.Client(base_url=service.url, headers=headers, trust_env=False, timeout=60) as api,
        Quarry(service.url, KEY) as quarry,
    ):
        new = {"name": "prometheus", "scopes": ["metrics"]}
        key = api.post("/keys", json=new).raise_for_status().json()["key"]
        schedule = {
            "name": "by-hand",
            "cron": "0 3 1 1 *",
            "request": body_of(target, source={"kind": "posted"}),
        }
        api.post("/schedules", json=schedule).raise_for_status()
        workers = [f"127.0.0.1:{number}" for number in (first, first + 1)]
        config = configure(tmp_path, service.url.removeprefix("http://"), workers, key)
        subprocess.run(["promtool", "check", "config", config], check=True)
        with running_prometheus(config, port) as prometheus:
            answer = api.post("/extract", json=body_of(target)).raise_for_status()
            *_, last = quarry.follow(answer.json()["id"])
            assert last.state is JobState.COMPLETED, last.problem
            wanted = dashboard_queries() | {r["record"]: r["expr"] for r in RULES if "record" in r}
            wanted = {name: query for name, query in wanted.items() if "vllm:" not in query}
            wanted |= {name: name for rule in RULES for name in names_in(rule["expr"])}
            wanted = {
                name: query
                for name, query in wanted.items()
                if not ONLY_IN_TROUBLE & {name, query.partition("{")[0]} and ONLY_AT_WORK not in query
            }
            assert len(wanted) > 40
            deadline = time.monotonic() + PATIENCE_S
            while missed := {name: query for name, query in wanted.items() if is_empty(prometheus, query)}:
                assert time.monotonic() < deadline, missed
                time.sleep(1)
            assert {one["metric"]["instance"] for one in ask(prometheus, "up == 1")} == {
                service.url.removeprefix("http://"),
                *workers,
            }
            committed = sum(
                float(one["value"][1]) for one in ask(prometheus, "quarry_worker_committed_samples_total")
            )
            (of_all,) = ask(prometheus, "quarry_committed_samples_total")
            assert committed == float(of_all["value"][1]) == last.progress.samples_written > 0
            for rule in RULES:
                # One that looks back sees the time before the workers had started.
                if "alert" in rule and rule["alert"] != "QuarryWorkerLost":
                    assert ask(prometheus, rule["expr"]) == [], rule["alert"]
            assert ask(prometheus, 'ALERTS{alertstate="firing"}') == []
