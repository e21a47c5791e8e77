"""A service with its owners, and the models and sources that it reads, which are overwritten as it works."""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from schemas.keys import NewKey, Scope
from service.control import keys as key_control
from service.settings import Settings
from service.store import keys
from tests.stateful.engine import ENGINE, FAULT
from tests.stateful.oracle import (
    MODEL_CHANGED,
    OWNERS,
    SOURCE_CHANGED,
    Checkpoints,
    JobRecord,
    ScheduleRecord,
    rows_of,
    sample,
)
from tests.stateful.service import LoggedErrors, Service

MODELS = ("base", "right")


class World:
    """A service, what is known of its jobs and schedules, and the models and sources that they read."""

    def __init__(self, root: Path, url: str, checkpoints: Checkpoints) -> None:
        self.root, self.checkpoints = root, checkpoints
        settings = Settings(
            data_dir=root / "data",
            database_url=url,
            model_roots=(root / "models",),
            source_roots=(root / "incoming",),
            engine=ENGINE,
            pool_bytes=2**20,
            poll_s=0.02,
            drain_s=5.0,
            unit_max_samples=2,
            units_in_flight=1,
            units_in_proof=1,
            min_free_bytes=0,
        )
        self.service = Service(settings)
        self.store = self.service.store
        # No slot comes at the very moment of a start by hand.
        self.service.clock.advance(1000.5)
        self.jobs: list[JobRecord] = []
        self.schedules: list[ScheduleRecord] = []
        self.removal_was_cut_off = False
        self.models: dict[str, int] = {}
        self.files: dict[str, frozenset[tuple[int, ...]]] = {}
        self.engine_deaths = 0
        self.reached: Counter[str] = Counter()
        self.logged = LoggedErrors()
        logging.getLogger("service").addHandler(self.logged)
        FAULT.rows_left = None
        (root / "models").mkdir()
        for number, model in enumerate(MODELS):
            self.overwrite_model(model, number)
        for owner in OWNERS:
            self.overwrite_source(owner, range(3))
        self._issue_keys(settings)

    def _issue_keys(self, settings: Settings) -> None:
        reading = {"model_roots": settings.model_roots, "source_roots": settings.source_roots}
        roots = {name: tuple(map(str, paths)) for name, paths in reading.items()}
        store = self.service.store
        key_control.issue(store, settings, NewKey(name="admin", scopes=(Scope.ADMIN,)))
        for owner, limit in (("ann", None), ("bob", 1)):
            scopes = (Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.SCHEDULES)
            key_control.issue(store, settings, NewKey(name=owner, scopes=scopes, max_jobs=limit, **roots))

    def close(self) -> None:
        logging.getLogger("service").removeHandler(self.logged)
        self.service.close()

    def settings_of(self, owner: str | None) -> Settings:
        return self.service.settings.narrowed(self.store.read(keys.granted, owner))

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def source(self, owner: str | None) -> Path:
        return self.root / "incoming" / str(owner) / "rows.jsonl"

    def overwrite_model(self, name: str, checkpoint: int, *, renamed: bool = True) -> None:
        self.checkpoints.write(checkpoint, self.model(name), renamed=renamed)
        if self.models.get(name) == checkpoint:
            return
        self.models[name] = checkpoint
        for record in self.jobs:
            if record.model == name and not record.completed:
                record.checkpoints.add(checkpoint)
                record.excuses.add(MODEL_CHANGED)
        for schedule in self.schedules:
            if schedule.model == name:
                schedule.models.add(checkpoint)

    def overwrite_source(self, owner: str | None, numbers: Iterable[int]) -> None:
        path, chosen = self.source(owner), sorted(set(numbers))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(sample(owner, number)) + "\n" for number in chosen))
        rows = self.files[str(path)] = rows_of(owner, chosen)
        for record in self.jobs:
            if record.body["source"].get("path") == str(path) and not record.completed:
                record.sources.append(rows)
                record.excuses.add(SOURCE_CHANGED)
