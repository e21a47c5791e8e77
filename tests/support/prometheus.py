"""Debian's Prometheus on the configuration of deploy/observability, with the targets of a test."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
PROGRAMS = ("prometheus", "promtool")


def missing() -> list[str]:
    """Return the programs that are not installed (Debian's package `prometheus`)."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def configure(folder: Path, api: str, workers: Sequence[str], key: str) -> Path:
    """Write the configuration for these targets, which are scraped every second; return its path."""
    (folder / "metrics_key").write_text(key)
    text = (FOLDER / "prometheus.yml").read_text()
    changes = {"quarry:8642": api, "/run/secrets/metrics_key": str(folder / "metrics_key"), "15s": "1s"}
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    targets = (FOLDER / "workers.yml").read_text()
    assert targets.count("quarry:9464") == 1
    (folder / "workers.yml").write_text(targets.replace("quarry:9464", "\n    - ".join(workers)))
    shutil.copy(FOLDER / "rules.yml", folder)
    return folder / "prometheus.yml"


@contextmanager
def running_prometheus(config: Path, port: int) -> Iterator[httpx2.Client]:
    """Start it, and yield a client of it that is ready."""
    listen = f"127.0.0.1:{port}"
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address={listen}"]
    with (config.parent / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            [*command, f"--storage.tsdb.path={config.parent / 'tsdb'}"], stdout=log, stderr=log
        )
    try:
        with httpx2.Client(base_url=f"http://{listen}", trust_env=False, timeout=60) as client:
            while not _is_ready(client):
                assert child.poll() is None, (config.parent / "prometheus.log").read_text()
                time.sleep(0.1)
            yield client
    finally:
        child.terminate()
        child.wait(60)


def _is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx2.TransportError:
        return False


def ask(client: httpx2.Client, query: str) -> list[Mapping[str, Any]]:
    """Return the samples of a query, each with `metric` and `value`."""
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    result: list[Mapping[str, Any]] = answer["data"]["result"]
    return result


def dashboard_queries() -> dict[str, str]:
    """Return the dashboard's queries with a range of 30 s, by their panels' titles and names."""
    document = json.loads((FOLDER / "grafana" / "dashboards" / "quarry.json").read_text())
    queries = {
        f"{panel['title']}: {target['refId']}": target["expr"].replace("$__rate_interval", "30s")
        for panel in document["panels"]
        for target in panel.get("targets", ())
    }
    annotations = document["annotations"]["list"]
    return queries | {f"annotation {one['name']}": one["expr"] for one in annotations}


def names_in(query: str) -> set[str]:
    """Return the metrics that a query reads, those of recording rules too."""
    bare = re.sub(r'"[^"]*"', "", query)
    return set(re.findall(r"\b(?:up|(?:instance|host):\w+:\w+|vllm:\w+|quarry_\w+|http_\w+)\b", bare))
