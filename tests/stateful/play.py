"""What users and fate do, each with what is noted of it: the machine's rules say when."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule, ScheduleChange
from schemas.source import Sample
from service.control import scheduling
from service.control.deletion import delete_job
from service.control.request_body import CheckedRequest, CheckedSamples
from service.control.submit import submit
from service.errors import Conflict, DiskFull, NotFound, QuotaExceeded, WriteFailed, problem_slug
from service.host import HOST_FILE, host_of
from service.store import JobRow, Store, hosts, jobs, schedules
from tests.stateful.engine import FAULT
from tests.stateful.files import full_disk
from tests.stateful.oracle import (
    ENGINE_FAILED,
    FIRST,
    GIVEN_UP,
    NO_SPACE,
    NOTHING_POSTED,
    OWNERS,
    RECIPE_CHANGED,
    SCHEDULE_REMOVED,
    Found,
    JobRecord,
    ScheduleRecord,
    check_job,
    check_schedule,
    check_state,
    rows_of,
    sample,
    tokens_of,
)
from tests.stateful.world import World

REFUSALS = (Conflict, NotFound, QuotaExceeded)
"""What a user may be told."""


class Play(World):
    """What is done to it; each act notes what must come of it."""

    # Jobs.

    def choose_key(self, choice: str, owner: str | None) -> tuple[str | None, str]:
        """Return an owner and a key that is new, or that of the newest job that is deleted or there."""
        for record in reversed(self.jobs):
            if record.key is not None and choice == ("deleted" if record.deleted else "taken"):
                return record.owner, record.key
        return owner, f"key {len(self.jobs)}"

    def submit_again(self, number: int) -> None:
        """Send a request again, as a client does that got no answer."""
        record = self.pick(number)
        if record is None or record.key is None:
            return
        samples = record.body["source"].get("samples", ())
        numbers = frozenset(one["token_ids"][1] - FIRST for one in samples)
        self.submit(
            record.owner, record.key, record.model, record.layers, numbers, canary=record.body["canary"]
        )

    def submit(
        self,
        owner: str | None,
        key: str,
        model: str,
        layers: tuple[int, ...],
        numbers: frozenset[int],
        *,
        canary: str,
    ) -> None:
        """Submit a job of inline samples, or of the owner's file if no numbers are given."""
        if numbers:
            source: dict[str, Any] = {
                "kind": "inline",
                "samples": [sample(owner, number) for number in sorted(numbers)],
            }
            rows = rows_of(owner, numbers)
        else:
            path = str(self.source(owner))
            source, rows = {"kind": "file", "path": path}, self.files[path]
        body = self._body(model, layers, source, canary)
        known = self._of_key(owner, key)
        same = known is not None and known.body == body
        try:
            checked = CheckedRequest.of(ExtractRequest.model_validate(body))
            row = submit(checked, key, self.store, self.settings_of(owner), owner=owner)
        except QuotaExceeded:
            assert owner == "bob" and not same
            return
        except Conflict:
            used = [job for job in self.jobs if (job.owner, job.key) == (owner, key)]
            assert used and not same, "a key that is new, or came with the same request, is refused"
            return
        if known is not None:
            assert same and row.id == known.id, "one key stands for two requests"
            return
        assert row.state is JobState.QUEUED, f"{key} was accepted for a job that is {row.state.value}"
        record = JobRecord(row.id, key, owner, model, layers, body, {self.models[model]}, [rows])
        self.jobs.append(record)

    def _body(
        self, model: str, layers: tuple[int, ...], source: dict[str, Any], canary: str
    ) -> dict[str, Any]:
        return {
            "model": str(self.model(model)),
            "layers": layers,
            "source": source,
            "loss": "all",
            "canary": canary,
        }

    def _of_key(self, owner: str | None, key: str) -> JobRecord | None:
        for record in self.jobs:
            if (record.owner, record.key) == (owner, key) and not record.deleted:
                return record
        return None

    def pick(self, number: int) -> JobRecord | None:
        """Return one of the jobs that are there, the newest for 0."""
        alive = [record for record in self.jobs if not record.deleted]
        return alive[-1 - number % len(alive)] if alive else None

    def delete(self, number: int, *, with_dataset: bool, store: Store | None = None) -> None:
        record = self.pick(number)
        if record is None:
            return
        self.look(record)
        with suppress(*REFUSALS):
            delete_job(store or self.store, self.service.settings, record.id, with_dataset=with_dataset)
            self._deleted(record)

    @staticmethod
    def _deleted(record: JobRecord) -> None:
        record.deleted = True
        if record.schedule is not None and not record.completed:
            record.schedule.given_back = True

    def after_a_deletion(self) -> None:
        """Note which jobs a deletion that was cut off has taken."""
        alive = {job.id: job.state for job in self.service.jobs()}
        for record in self.jobs:
            if alive.get(record.id) in {None, JobState.DELETING}:
                self._deleted(record)

    def ask(self, number: int, verb: str) -> None:
        record = self.pick(number)
        if record is None:
            return
        with suppress(*REFUSALS):
            self.store.write(getattr(jobs, verb), record.id)

    def set_priority(self, number: int, priority: int) -> None:
        record = self.pick(number)
        if record is not None:
            with suppress(*REFUSALS):
                self.store.write(jobs.set_priority, record.id, priority)

    # Schedules.

    def add_schedule(
        self,
        owner: str | None,
        name: str,
        kind: str,
        model: str,
        *,
        takes_all: bool,
        overlap: str,
        canary: str,
    ) -> None:
        path = str(self.source(owner))
        source = {"kind": "posted"} if kind == "posted" else {"kind": "file", "path": path}
        schedule = NewSchedule.model_validate(
            {
                "name": name,
                "cron": "0 * * * *",
                "overlap": overlap,
                "samples": "all" if takes_all else "new",
                "request": self._body(model, (1,), source, canary),
            }
        )
        there = self._of_name(name)
        try:
            scheduling.add(self.store, self.settings_of(owner), schedule, owner)
        except Conflict:
            assert there is not None
            return
        assert there is None
        source_path = None if kind == "posted" else path
        record = ScheduleRecord(name, owner, kind, takes_all, model, (1,), source_path, canary)
        record.models.add(self.models[model])
        self.schedules.append(record)

    def _of_name(self, name: str) -> ScheduleRecord | None:
        return next((one for one in self.schedules if one.name == name and not one.removed), None)

    def pick_schedule(self, number: int) -> ScheduleRecord | None:
        self.after_a_removal()
        there = [one for one in self.schedules if not one.removed]
        return there[-1 - number % len(there)] if there else None

    def change_schedule(self, number: int, change: dict[str, Any]) -> None:
        if (schedule := self.pick_schedule(number)) is not None:
            changed = ScheduleChange.model_validate(change)
            scheduling.change(self.store, self.service.settings, schedule.name, changed)

    def remove_schedule(self, number: int) -> None:
        schedule = self.pick_schedule(number)
        if schedule is None:
            return
        self.notice_slots()
        scheduling.remove(self.store, self.service.settings, schedule.name)
        self._removed(schedule)

    def after_a_removal(self) -> None:
        """Note which schedules a removal that was cut off has taken, which a server may commit later."""
        there = {view.name for view in self.store.read(schedules.page)}
        for schedule in self.schedules:
            if self.removal_was_cut_off and not schedule.removed and schedule.name not in there:
                self._removed(schedule)

    def _removed(self, schedule: ScheduleRecord) -> None:
        schedule.removed = True
        for record in self.jobs:
            if record.schedule is schedule and not record.completed:
                record.must = frozenset()
                record.excuses.add(SCHEDULE_REMOVED)

    def post(self, number: int, numbers: Iterable[int]) -> None:
        """Post samples; where a schedule takes all, each of them once."""
        schedule = self.pick_schedule(number)
        if schedule is None or schedule.kind != "posted":
            return
        rows = {one: tokens_of(schedule.owner, one) for one in sorted(set(numbers))}
        fresh = [
            one for one, tokens in rows.items() if not (schedule.takes_all and tokens in schedule.posted)
        ]
        if fresh:
            named = (sample(schedule.owner, one, named=one % 2 == 0) for one in fresh)
            number, _ = self.store.read(schedules.numbered, schedule.name)
            samples = list(map(Sample.model_validate, named))
            scheduling.post_samples(self.store, self.service.settings, number, CheckedSamples.of(samples))
            schedule.posted.update(rows[one] for one in fresh)

    def run_now(self, number: int) -> None:
        if (schedule := self.pick_schedule(number)) is not None:
            self.service.clock.advance(1.0)
            with suppress(*REFUSALS):
                scheduling.run_now(self.store, self.service.settings, schedule.name)
            self.notice_slots()

    def notice_slots(self) -> None:
        """Note the jobs that slots have made."""
        known = {record.id for record in self.jobs}
        for schedule in self.schedules:
            if schedule.removed:
                continue
            for run in reversed(self.store.read(schedules.past, schedule.name)):
                if run.job_id is None or run.job_id in known:
                    continue
                source = {} if schedule.source is None else {"path": schedule.source}
                rows = self.files[schedule.source] if schedule.source else frozenset(schedule.posted)
                record = JobRecord(
                    run.job_id,
                    None,
                    schedule.owner,
                    schedule.model,
                    schedule.layers,
                    {"source": source, "canary": schedule.canary},
                    {self.models[schedule.model]},
                    [rows] if schedule.source else [],
                    schedule,
                    rows,
                )
                if len(schedule.models) > 1:
                    record.excuses.add(RECIPE_CHANGED)
                if schedule.takes_all and not rows - {tokens for _, tokens in schedule.written}:
                    record.excuses.add(NOTHING_POSTED)
                self.jobs.append(record)

    # Fate.

    def excuse_all(self, why: str) -> None:
        for record in self.jobs:
            if not record.completed:
                record.excuses.add(why)

    def forget(self) -> None:
        """Give the data folder up, as if it were lost; it comes back, which its place is free for."""
        settings = self.service.settings
        host_of(self.store, settings)
        self.excuse_all(GIVEN_UP)
        self.store.write(hosts.forget, (settings.data_dir / HOST_FILE).read_text())
        host_of(self.store, settings)
        self.reached["data folders given up"] += 1

    def meet_full_disk(self, act: Callable[["Play"], None], at: int, *, stays: bool) -> None:
        """Do something while the data folder's disk is full at write call `at`, or from then on."""
        refusals = suppress(DiskFull, WriteFailed)
        with full_disk(self.service.settings.data_dir, at, stays=stays) as calls, refusals:
            act(self)
        if calls.acted:
            self.reached["full disks"] += 1
            self.excuse_all(NO_SPACE)
        self.notice_slots()
        self.after_a_deletion()

    def free_space(self) -> list[JobRecord]:
        """Resume what a full disk blocked; return what was resumed."""
        blocked = [record for record in self.jobs if not record.deleted and self._has_no_space(record)]
        resumed = []
        for record in blocked:
            with suppress(*REFUSALS):
                self.store.write(jobs.resume, record.id)
                resumed.append(record)
        return resumed

    def _has_no_space(self, record: JobRecord) -> bool:
        problem = self.store.read(jobs.job, record.id).problem
        return problem is not None and problem.type.endswith(problem_slug(DiskFull))

    def plan_fault(self, rows: int, *, dies: bool) -> None:
        FAULT.rows_left, FAULT.dies = rows, dies
        self.engine_deaths += dies
        if not dies or self.engine_deaths > 1:
            self.excuse_all(ENGINE_FAILED)

    def notice_fault(self) -> None:
        """A fault that no row has met yet meets none later: a job made since has no excuse."""
        FAULT.rows_left = FAULT.before_load = None

    # What must hold.

    def look(self, record: JobRecord) -> tuple[JobRow, Found | None] | None:
        """Hold one completed job against what is known; return it with its dataset."""
        with suppress(NotFound):
            job = self.store.read(jobs.job, record.id)
            if job.state is not JobState.COMPLETED:
                return job, None
            if not record.completed:
                self.reached[f"completed jobs, canary: {record.body['canary']}"] += 1
            found = check_job(self.checkpoints, job, record, self.service.settings.dataset_dir(record.id))
            if record.schedule is not None:
                others = [one for one in self.jobs if one.schedule is record.schedule and not one.deleted]
                check_schedule(job, record, found, stopped=not all(one.completed for one in others))
            return job, found
        return None

    def check(self) -> None:
        """Hold everything against what is known, once all rests."""
        assert not self.logged.messages, self.logged.messages[0]
        self.after_a_deletion()
        rows = {job.id: job for job in self.service.jobs()}
        alive = {record.id: record for record in self.jobs if not record.deleted}
        assert rows.keys() == alive.keys(), "jobs came or went by themselves"
        for record in alive.values():
            looked = self.look(record)
            assert looked is not None
            check_state(looked[0], record)
            if looked[0].problem is not None:
                self.reached[f"{looked[0].state.value}: {looked[0].problem.type.rpartition(':')[2]}"] += 1
        for owner in OWNERS[1:]:
            seen, _ = self.store.read(jobs.page, owner=owner, limit=200)
            assert {job.id for job in seen} == {id for id, one in alive.items() if one.owner == owner}
            listed = self.store.read(schedules.page, owner=owner)
            own = {one.name for one in self.schedules if one.owner == owner and not one.removed}
            assert {view.name for view in listed} == own

    def settle(self) -> None:
        self.service.settle(self.notice_slots)
        self.check()

    def end(self) -> None:
        """Settle; then, with space on the disk again, nothing stays blocked for want of it."""
        self.settle()
        if resumed := self.free_space():
            self.settle()
            blocked = [record.id for record in resumed if not record.deleted and self._has_no_space(record)]
            assert not blocked, f"there is space again, and {blocked} were resumed: they are blocked"
