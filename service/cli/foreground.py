"""`quarry extract`: one job, one worker, no server; its state lies in `OUT/.quarry` until `OUT` is whole."""

import fcntl
import shutil
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from schemas.dataset.manifest import Manifest
from schemas.events import Event
from schemas.identity import Identity
from schemas.job import ENDED_JOB_STATES, JobState, Problem, Progress
from schemas.names import is_local_model, job_id_from_key
from schemas.request import ExtractRequest
from service.cli.progress_bar import ProgressDisplay
from service.control.submit import check
from service.errors import EngineDied, OptionRefused
from service.settings import Settings
from service.store import JobRow, Store, jobs, migration
from service.work.supervisor import Supervisor
from service.work.worker_process import JOB_ENDED_CODES, stop_grace_s, worker_command

PRIVATE = ".quarry"
SPENT = ".quarry.done"
"""What `PRIVATE` is renamed to before it is deleted: a run that is half deleted is never taken up again."""
MANIFESTS = "manifests"
LOG_FILE = "worker.log"
POLL_S = 0.2
PAGE_EVENTS = 500


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. `signal` is the one that stopped it; the job then goes on with the next run."""

    state: JobState
    progress: Progress
    problem: Problem | None = None
    signal: int | None = None

    @property
    def completed(self) -> bool:
        """Whether the dataset is whole."""
        return self.state is JobState.COMPLETED


def extract_to(out: Path, request: ExtractRequest, settings: Settings, display: ProgressDisplay) -> Ending:
    """Run `request` until `out` holds its dataset and nothing else, or a signal comes. Main thread only.

    A new job's id is made of the request and of what its source holds, so that other rows from a source of
    the same name are another job in the repository that both are pushed to. A folder keeps its job: the same
    request goes on with it, and where its dataset is whole the source must be the one that it was made from.

    Raises:
        OptionRefused: `out` holds another job or another source's rows, is in use, or is not empty.
        RequestError, HubDenied, HubUnavailable: as `service.control.submit.check`; then nothing is written.
    """
    key = None
    private = out / PRIVATE
    if not private.exists():
        finished = _finished(out, request, settings)
        if finished is not None:
            return finished
        _refuse_filled(out)
        check(request, settings)
        key = _key(request, settings)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = settings.model_copy(update={"data_dir": private, "out_dir": out, "database_url": None})
    with _alone(private), _opened(settings) as store:
        row = _unfinished(store, request, out)
        if row is None:
            key = key or _key(request, settings)
            row, _ = store.write(jobs.submit, job_id_from_key(key), key, request)
        if row.state in {JobState.FAILED, JobState.CANCELLED, JobState.BLOCKED}:
            store.write(jobs.resume, row.id)
        ending = _run(store, row.id, settings, display)
    if ending.completed:
        private.rename(out / SPENT)
        shutil.rmtree(out / SPENT)
    return ending


def _key(request: ExtractRequest, settings: Settings) -> str:
    """Return what the id of a new job is made of. Raises SourceRefused, HubUnavailable."""
    from service.plan.sources import fingerprint

    return f"{request.canonical_json()}\n{fingerprint(request.source, settings)}"


def _run(store: Store, job_id: str, settings: Settings, display: ProgressDisplay) -> Ending:
    """Run a worker until the job rests or a signal comes, showing what it does."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    log_path = settings.data_dir / LOG_FILE
    try:
        with log_path.open("ab") as log, display:
            supervisor = Supervisor(
                worker_command("--only-job", job_id),
                settings.with_secrets(),
                stop_grace_s(settings),
                last_codes=JOB_ENDED_CODES,
                output=log,
            )
            supervisor.start()
            (last,) = deque(_events(store, job_id, 0), maxlen=1)  # what earlier runs did is not shown again
            alive = True
            while alive:
                supervisor.join(POLL_S)
                alive = supervisor.is_alive()  # before the events: the last look then sees the last of them
                for event in _events(store, job_id, last.id):
                    display.show(event)
                    last = event
                display.show(last)
                if received:
                    supervisor.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ending = Ending(last.state, last.progress, last.problem)
    if ending.state in ENDED_JOB_STATES or ending.state is JobState.BLOCKED:
        return ending
    if received:
        return Ending(ending.state, ending.progress, signal=received[0])
    died = EngineDied(
        "the worker ended before the job did", cure=f"see {log_path}, then run the same command again"
    )
    return Ending(ending.state, ending.progress, died.problem())


def _events(store: Store, job_id: str, after: int) -> Iterator[Event]:
    """Yield every event after the one numbered `after`; a job's first is its submission."""
    while events := store.read(jobs.events, job_id, after=after, limit=PAGE_EVENTS):
        yield from events
        after = events[-1].id


def _finished(out: Path, request: ExtractRequest, settings: Settings) -> Ending | None:
    """Return the ending of a run of `request` that made `out` whole before, if there was one.

    Raises OptionRefused where it holds another dataset; SourceRefused, UnknownModel or HubUnavailable where
    nobody can say.
    """
    manifests = [_manifest(path) for path in sorted((out / MANIFESTS).glob("*.json"))]
    if not manifests:
        return None
    manifest = next((one for one in manifests if one.request == request), None)
    if manifest is None:
        raise OptionRefused(
            f"{out} holds the dataset of another request", field="--out", cure="give an empty folder"
        )
    changed = _changed(manifest.provenance.identity, request, settings)
    if changed is not None:
        raise OptionRefused(
            f"{out} holds the dataset of this request as it was; since then {changed} has changed",
            field="--out",
            cure="give an empty folder",
        )
    shutil.rmtree(out / SPENT, ignore_errors=True)
    totals = manifest.totals
    return Ending(
        JobState.COMPLETED,
        Progress(
            plan_done=True,
            samples_planned=totals.samples_planned,
            samples_written=totals.samples_written,
            samples_rejected=totals.samples_rejected,
            tokens_written=totals.tokens,
            bytes_written=totals.bytes,
        ),
    )


def _changed(identity: Identity, request: ExtractRequest, settings: Settings) -> str | None:
    """Say what of a finished dataset's inputs is no longer what it was made from.

    A Hub model without a revision is not asked for: the dataset names the commit that it was made with.
    """
    from service.plan.model_folder import locate_model
    from service.plan.sources import fingerprint

    if fingerprint(request.source, settings) != identity.source_fingerprint:
        return "its source"
    model = request.model
    if is_local_model(model) and locate_model(model, None, settings).revision != identity.revision:
        return f"the model in {model}"
    return None


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise OptionRefused(
            f"{path} is not a manifest of this version", field="--out", cure="give an empty folder"
        ) from error


def _refuse_filled(out: Path) -> None:
    """Refuse a folder that holds something, so that in the end it holds exactly the dataset."""
    if out.is_dir() and any(out.iterdir()):
        raise OptionRefused(
            f"{out} is not empty and holds no unfinished run of this job",
            field="--out",
            cure="give an empty folder",
        )


def _unfinished(store: Store, request: ExtractRequest, out: Path) -> JobRow | None:
    """Return the job of an earlier run in `out`; none where it was killed before it had one.

    Whether the source is still the same is for the planner to say, which knows how much of it is planned.
    """
    newest, _ = store.read(jobs.page, limit=1)
    if not newest:
        return None
    row = store.read(jobs.job, newest[0].id)
    if row.request != request:
        raise OptionRefused(
            f"{out} holds the unfinished run of another job ({row.id})",
            field="--out",
            cure="run that job's file, delete the folder, or give an empty one",
        )
    return row


@contextmanager
def _opened(settings: Settings) -> Iterator[Store]:
    store = Store(settings.database())
    try:
        store.write(migration.migrate)
        yield store
    finally:
        store.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: of two runs, the first to end would delete the other's state."""
    with (folder / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionRefused(
                f"another run is using {folder.parent}",
                field="--out",
                cure="wait for it, or give another folder",
            ) from error
        yield
