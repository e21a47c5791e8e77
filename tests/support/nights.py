"""A schedule of nightly runs on simulated time over a folder that grows, each night driven by hand."""

import asyncio
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from schemas.job import RESTING_JOB_STATES, JobState
from schemas.schedule import NewSchedule, RunView, ScheduleChange
from schemas.source import Sample
from service.control import scheduling
from service.control.request_body import CheckedSamples
from service.errors import EngineRefused
from service.proof.verify import verify_dataset
from service.store import JobRow, Store, jobs, plans, schedules
from tests.support.jobs import Shop
from tests.support.roles import run_planning
from tests.support.store_cases import Clock

NAME = "nightly"
DAY_S = 86_400.0


def row(number: int) -> dict[str, Any]:
    """Return conversation `number`; its id and its words say which it is."""
    return {
        "id": f"s{number}",
        "messages": [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": f"Answer {number}. " + "It holds things. " * (number * 7 % 12)},
        ],
    }


class Nights:
    """A shop with one schedule. `folder` is its source, `target` its model."""

    def __init__(self, shop: Shop, clock: Clock, target: Path, folder: Path, **schedule: Any) -> None:
        """Make the schedule; `shop` must know `clock` and may read `folder`."""
        self.shop, self.clock, self.target, self.folder = shop, clock, target, folder
        folder.mkdir(exist_ok=True)
        request = {
            "model": str(target),
            "source": {"kind": "file", "path": str(folder)},
            "canary": "skip",
            **schedule.pop("request", {}),
        }
        rules = {"name": NAME, "cron": "0 3 * * *", "request": request} | schedule
        self.rules = NewSchedule.model_validate(rules)
        self.add()

    @classmethod
    def open(cls, root: Path, target: Path, url: str, **schedule: Any) -> "Nights":
        """Open a fresh shop on the fake engine whose units hold three samples."""
        clock = Clock()
        shop = Shop.open(
            root,
            target,
            database_url=url,
            source_roots=(root / "incoming",),
            unit_max_samples=3,
            **schedule.pop("settings", {}),
        )
        on_clock(shop, clock)
        return cls(shop, clock, target, root / "incoming", **schedule)

    @property
    def store(self) -> Store:
        return self.shop.store

    def drop(self, numbers: Iterable[int], name: str = "") -> None:
        """Put a file of conversations into the folder, in one piece."""
        rows = [row(number) for number in numbers]
        name = name or f"{len(list(self.folder.iterdir())):03}.jsonl"
        temporary = self.folder / f".{name}"
        temporary.write_text("".join(json.dumps(one) + "\n" for one in rows))
        temporary.rename(self.folder / name)

    def change_template(self, word: str) -> None:
        """Give the model another chat template, which renders the same."""
        path = self.target / "chat_template.jinja"
        text = path.read_text().partition("{#")[0]
        path.write_text(f"{text}{{# {word} #}}" if word else text)

    def add(self, owner: str | None = None) -> None:
        """Make the schedule, again where it was deleted."""
        self.store.write(schedules.add, self.rules, owner)

    def post(self, *numbers: int, ids: bool = True) -> None:
        """Post conversations to the schedule, with or without their ids."""
        rows = (row(number) if ids else row(number) | {"id": None} for number in numbers)
        samples = [Sample.model_validate(one) for one in rows]
        scheduling.post_samples(self.store, self.shop.settings, self.number(), CheckedSamples.of(samples))

    def number(self) -> int:
        """Return the schedule's number."""
        return self.store.read(schedules.numbered, NAME)[0]

    def waiting(self) -> list[Path]:
        """Return the files of posted samples that wait for the next job."""
        return sorted(self.shop.settings.spool(self.number()).glob("*"))

    def change(self, **values: Any) -> None:
        """Change the schedule."""
        scheduling.change(self.store, self.shop.settings, NAME, ScheduleChange.model_validate(values))

    def submit(self) -> RunView:
        """Let a day pass; return what became of the newest slot that was decided on."""
        self.clock.advance(DAY_S)
        scheduling.submit_due(self.store, self.shop.settings)
        return self.run()

    def run(self) -> RunView:
        """Return the newest run."""
        return self.store.read(schedules.past, NAME, limit=1)[0]

    def work(self) -> None:
        """Plan, capture and publish until nothing is left."""
        while True:
            self.shop.plan()
            for job in self.jobs():
                if self.store.read(jobs.state, job.id) not in RESTING_JOB_STATES:
                    self.shop.capture(job.id)
            self.shop.publish()
            if not scheduling.submit_due(self.store, self.shop.settings):
                return

    def night(self) -> RunView:
        """Let a day pass and work; return the run."""
        self.submit()
        self.work()
        return self.run()

    def jobs(self) -> list[JobRow]:
        """Return all jobs, oldest first."""
        return self.store.read(jobs.page, limit=200)[0][::-1]

    def job(self) -> JobRow:
        """Return the newest job."""
        return self.jobs()[-1]

    def written(self) -> dict[str | None, Counter[str]]:
        """Return how often each sample is in the completed jobs of each template, each of which is whole."""
        found: dict[str | None, Counter[str]] = defaultdict(Counter)
        for job in self.jobs():
            dataset = self.shop.settings.dataset_dir(job.id)
            if job.state is JobState.COMPLETED and job.progress.samples_written:
                assert job.identity is not None
                report = verify_dataset(dataset)
                assert report.ok, report.findings
                found[job.identity.template_sha256].update(one["source_id"] for one in self.shop.rows(job.id))
        return found

    def once(self) -> list[str]:
        """Return the samples that were written under any template, each of which must be there once."""
        (counts,) = self.written().values()
        assert set(counts.values()) == {1}, counts
        return sorted(counts, key=lambda name: int(name[1:]))


def on_clock(shop: Shop, clock: Clock) -> None:
    """Give a shop a store whose time is simulated."""
    shop.store.close()
    url = shop.settings.database()
    shop.store = Store(url, clock.of(url))


def names(*ranges: range) -> list[str]:
    """Return the ids of conversations."""
    return [f"s{number}" for one in ranges for number in one]


def open_nights(root: Path, target: Path, url: str, **schedule: object) -> Nights:
    """Open them with a copy of the target that may be changed."""
    own = Path(shutil.copytree(target, root / "models" / "target"))
    return Nights.open(root, own, url, **schedule)


class Faults:
    """What goes wrong on the engine: after some rows it refuses to go on, or answers nothing."""

    def __init__(self) -> None:
        self.mend()

    def mend(self) -> None:
        self.rows_left, self.hangs = math.inf, False

    def fail_after(self, rows: int) -> None:
        self.rows_left, self.hangs = rows, False

    def hang_after(self, rows: int) -> None:
        self.rows_left, self.hangs = rows, True

    async def meet(self) -> None:
        self.rows_left -= 1
        if self.rows_left < 0 and self.hangs:
            await asyncio.sleep(3600)
        if self.rows_left < 0:
            raise EngineRefused("the engine cannot go on")


def hang(nights: Nights, faults: Faults, rows: int) -> None:
    """Capture until the engine hangs, and end the worker then."""
    faults.hang_after(rows)
    nights.shop.patience_s = 2.0
    with suppress(TimeoutError):
        nights.shop.capture(nights.job().id)
    nights.shop.patience_s = 120.0
    faults.mend()


def plan_some(nights: Nights, num_units: int) -> None:
    """Plan until there are so many units; then the planner dies."""
    job_id = nights.job().id

    def enough() -> bool:
        return nights.store.read(jobs.job, job_id).progress.units_planned >= num_units

    run_planning(nights.store, nights.shop.settings, "mortal", enough)
    plans.lease(nights.store, "dead", 1.0)
