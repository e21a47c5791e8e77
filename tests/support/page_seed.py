"""A real service with something to look at: jobs in each state, schedules, a worker on the fake engine."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from examples.tiny_target import CONVERSATIONS
from tests.support.browser import Browser
from tests.support.service_process import serving
from tests.support.tiny_model import random_target

KEY = "k" * 40
STEP_S = "0.4"
"""Of the fake engine: slow enough that a job is at work while it is looked at."""
SHORT_CHARACTERS = 800
"""Of a conversation that fits the jobs' limit of tokens."""


@dataclass(frozen=True)
class Seeded:
    """A running service, a client with the operator's key, and jobs by what became of them."""

    url: str
    client: httpx2.Client
    jobs: dict[str, str]

    def pages(self) -> dict[str, str]:
        """Return the path of every page by its name."""
        whole = f"/ui/jobs/{self.jobs['whole']}"
        return {
            "jobs": "/",
            "job": f"/ui/jobs/{self.jobs['running']}",
            "job-completed": whole,
            "job-blocked": f"/ui/jobs/{self.jobs['failed']}",
            "files": f"{whole}/files",
            "rejects": f"{whole}/rejects",
            "sample": f"{whole}/samples/0/1",
            "schedules": "/ui/schedules",
            "schedule": "/ui/schedules/nightly",
            "workers": "/ui/workers",
            "sign-in": "/ui/sign-in",
            "problem": "/ui/jobs/j-0000000000000000",
        }

    def sign_in(self, browser: Browser) -> None:
        """Give a browser the cookie of the operator's session."""
        answer = self.client.post("/ui/sign-in", data={"key": KEY, "to": "/"})
        assert answer.status_code == 303, answer.text
        for name, value in answer.cookies.items():
            browser.call("Network.setCookie", name=name, value=value, url=self.url)


def samples(first: int, last: int, times: int = 1) -> dict[str, Any]:
    """Return a source of short conversations, and of one sample that is too long and one that is empty."""
    short = [line for line in CONVERSATIONS.read_text().splitlines() if len(line) < SHORT_CHARACTERS]
    rows = [json.loads(line) for line in short[first:last]]
    many = [row | {"id": f"{row['id']}-{turn}"} for turn in range(times) for row in rows]
    odd = [{"id": "all-of-it", "text": "a long story " * 400}, {"id": "nothing", "text": ""}]
    return {"kind": "inline", "samples": [*many, *odd]}


@contextmanager
def seeded(folder: Path) -> Iterator[Seeded]:
    """Start the service and bring its jobs to where they are looked at."""
    model = random_target(folder / "qwen3-small", layers=8, hidden=128)
    (folder / "key").write_text(KEY)
    settings = {
        "QUARRY_ADMIN_KEY_FILE": str(folder / "key"),
        "QUARRY_UNIT_MAX_SAMPLES": "8",
        "QUARRY_IN_FLIGHT_REQUESTS": "4",
        "QUARRY_FAKE_STEP_S": STEP_S,
        "QUARRY_MODEL_ROOTS": json.dumps([str(folder)]),
        "QUARRY_SOURCE_ROOTS": json.dumps([str(folder)]),
    }
    with serving(folder / "quarry-data", **settings) as service:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=service.url, headers=headers, timeout=60, trust_env=False) as client:
            yield Seeded(service.url, client, _fill(client, model))


def _fill(client: httpx2.Client, model: Path) -> dict[str, str]:
    """Submit jobs and schedules; return the ids of the jobs."""
    body = {"model": str(model), "layers": [2, 4, 6], "canary": "skip", "max_tokens": 256}
    body |= {"on_too_long": "reject"}

    def submit(priority: int = 0, **changes: Any) -> str:
        answer = client.post("/extract", json=body | changes, params={"priority": priority})
        assert answer.status_code == 202, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def until(job_id: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        for _ in range(1200):
            if is_so(client.get(f"/jobs/{job_id}").json()):
                return
            time.sleep(0.1)
        raise AssertionError(client.get(f"/jobs/{job_id}").text)

    rows = model.parent / "new.jsonl"
    rows.write_text("".join(json.dumps({"text": f"what {number} is"}) + "\n" for number in range(3)))
    source = {"kind": "file", "path": str(rows)}
    ended = {"completed", "failed", "blocked"}
    nightly = {"name": "nightly", "cron": "0 3 * * *", "request": body | {"source": source, "loss": "all"}}
    weekly = nightly | {
        "name": "weekly-all",
        "cron": "30 1 * * 0",
        "samples": "all",
        "time_zone": "Europe/Berlin",
    }
    broken = nightly | {"name": "code-traces", "request": nightly["request"] | {"canary": "run"}}
    for schedule in (nightly, weekly, broken):
        answer = client.post("/schedules", json=schedule)
        assert answer.status_code == 201, answer.text
    client.patch("/schedules/weekly-all", json={"paused": True})
    jobs = {"whole": submit(source=samples(0, 40))}
    until(jobs["whole"], lambda job: job["state"] in ended)
    for name, of in (("nightly", "night"), ("code-traces", "failed")):
        jobs[of] = client.post(f"/schedules/{name}/run").json()["job_id"]
        until(jobs[of], lambda job: job["state"] in ended)
    jobs["paused"] = submit(source=samples(40, 80))
    until(jobs["paused"], lambda job: job["progress"]["units_done"] > 1)
    client.post(f"/jobs/{jobs['paused']}/pause").raise_for_status()
    jobs["cancelled"] = submit(source=samples(80, 90))
    client.post(f"/jobs/{jobs['cancelled']}/cancel").raise_for_status()
    jobs["running"] = submit(source=samples(0, 90, times=13), priority=5)
    until(jobs["running"], lambda job: job["progress"]["units_done"] > 3)
    jobs["queued"] = submit(source=samples(10, 30))
    return jobs
