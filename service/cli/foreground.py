"""`quarry extract`: one job, one worker, no server; its state is in `OUT/.quarry` until `OUT` is complete."""

import shutil
import signal
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import Manifest, read_manifest
from schemas.digest import canonical_json
from schemas.job import RESTING_JOB_STATES, JobState, Problem, Progress
from schemas.names import MANIFEST_FOLDER, PRIVATE_FOLDER, job_id_from_content, manifest_path
from schemas.request import ExtractRequest, HubTarget
from schemas.worker import Role
from service.cli.progress_bar import ProgressDisplay
from service.control.submit import check
from service.errors import STORE_AWAY, EngineDied, OptionRefused
from service.folder_lock import locked
from service.settings import Settings
from service.store import JobRow, NewJob, Store, jobs, migration
from service.work.supervisor import Supervisor
from service.work.worker_process import JOB_ENDED_CODES, stop_grace_s, worker_command

if TYPE_CHECKING:
    from service.plan.model_folder import ModelContent

SPENT = f"{PRIVATE_FOLDER}.done"
"""What `PRIVATE_FOLDER` is renamed to before it is deleted: a half-deleted run is never resumed."""
LOG_FILE = "worker.log"
POLL_S = 0.2

Content = tuple[str, "ModelContent"]
"""The fingerprint of a source, and the content of a model."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. `signal` is the one that stopped it; the next run then continues the job.

    `published` names the repository that already holds the job's dataset, so that nothing was captured.
    """

    state: JobState
    progress: Progress
    problem: Problem | None = None
    signal: int | None = None
    published: str | None = None

    @property
    def completed(self) -> bool:
        """Whether the dataset is complete."""
        return self.state is JobState.COMPLETED


def extract_to(out: Path, request: ExtractRequest, settings: Settings, display: ProgressDisplay) -> Ending:
    """Run `request` until `out` holds its dataset and nothing else, or a signal arrives. Main thread only.

    A new job's id hashes the request and the content of the source and the model, so new content gives a new
    id in the same repository. A manifest of that id in `out`, or in the repository, means that the job is
    done.

    Raises:
        OptionRefused: `out` holds another job, is in use, or is not empty.
        RequestError, HubDenied, HubUnavailable: as `service.control.submit.check`; nothing is written then.
    """
    if request.storage.retention == "consumed":
        cure = "leave it out, or submit the job to a service, where consumers can say what they have"
        raise OptionRefused("`quarry extract` has no consumers", field="storage.retention", cure=cure)
    if request.webhook is not None:
        raise OptionRefused("`quarry extract` reports by its exit code", field="webhook", cure="leave it out")
    private = out / PRIVATE_FOLDER
    content = None
    if not private.exists():
        content = _content(request, settings)
        finished = _finished(out, request, content)
        if finished is not None:
            return finished
        if out.is_dir() and any(out.iterdir()):  # at the end it must hold exactly the dataset
            raise _refused(f"{out} is not empty and holds no unfinished run of this job")
        check(request, settings)
        if request.hub is not None and _is_published(request, request.hub, content, settings):
            return Ending(JobState.COMPLETED, Progress(), published=request.hub.repo_id)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {"data_dir": private, "out_dir": out, "database_url": None, "roles": tuple(Role)}
    settings = settings.model_copy(update=own)
    busy = f"another run is using {out}"  # of two, the first to end would delete the other's state
    with locked(private / "lock", busy, "--out"), closing(Store(settings.database())) as store:
        store.write(migration.migrate)
        row = _unfinished(store, request, out)
        if row is None or row.identity is None:
            # Nothing is planned yet, so the job captures what source and model hold now.
            job_id = _job_id(request, content or _content(request, settings))
            if row is not None and row.id != job_id and row.state not in RESTING_JOB_STATES:
                store.write(jobs.cancel, row.id)
            row, _ = store.write(jobs.submit, NewJob.of(job_id, job_id, request))
        if row.state in RESTING_JOB_STATES - {JobState.COMPLETED}:
            store.write(jobs.resume, row.id)
        ending = _run(store, row.id, settings, display)
    if ending.completed:
        private.rename(out / SPENT)
        shutil.rmtree(out / SPENT)
    return ending


def _content(request: ExtractRequest, settings: Settings) -> Content:
    """Read source and model of a new job. Raises SourceRefused, UnknownModel, HubUnavailable."""
    from service.plan.model_folder import content_of, locate_model
    from service.plan.sources import open_source

    fingerprint = open_source(request.source, settings).listed().fingerprint()
    return fingerprint, content_of(locate_model(request.model, request.revision, settings))


def _job_id(request: ExtractRequest, content: Content) -> str:
    """Return the id of a new job, made from what it captures: it changes if the source or model does."""
    fingerprint, model = content
    parts = (request.canonical_json(), fingerprint, canonical_json(asdict(model)))
    return job_id_from_content("\n".join(parts))


def _run(store: Store, job_id: str, settings: Settings, display: ProgressDisplay) -> Ending:
    """Run a worker until the job rests or a signal arrives, showing its progress."""
    received: list[int] = []
    is_told = False

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
            while supervisor.is_alive():
                supervisor.join(POLL_S)
                with suppress(*STORE_AWAY):  # retried at the next poll
                    display.show(store.read(jobs.job, job_id).view())
                if received and not is_told:
                    supervisor.stop()
                    is_told, most = True, f"{stop_grace_s(settings):.0f} s at most"
                    print(f"stopping: what the engine holds is finished first, in {most}", file=sys.stderr)
            job = store.read(jobs.job, job_id).view()
            display.show(job)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ending = Ending(job.state, job.progress, job.problem)
    if ending.state in RESTING_JOB_STATES:
        return ending
    if received:
        return Ending(ending.state, ending.progress, signal=received[0])
    died = EngineDied(
        "the worker ended before the job did", cure=f"see {log_path}, then run the same command again"
    )
    return Ending(ending.state, ending.progress, died.problem())


def _finished(out: Path, request: ExtractRequest, content: Content) -> Ending | None:
    """Return the ending of an earlier run that completed `out`, if there was one. Raises OptionRefused."""
    if not any((out / MANIFEST_FOLDER).glob("*.json")):
        return None
    from service.publish.assemble import intact_manifest

    own = out / manifest_path(_job_id(request, content))
    manifest = intact_manifest(own) if own.exists() else None
    if manifest is None or not _is_of(manifest, content):
        raise _refused(
            f"{out} holds the dataset of another request, or its source or model has changed since"
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


def _is_published(request: ExtractRequest, hub: HubTarget, content: Content, settings: Settings) -> bool:
    """Return whether the repository `hub` holds the job's dataset. Raises HubDenied, HubUnavailable."""
    from service.artifacts.dataset_files import MANIFEST_BYTES
    from service.artifacts.repository import BRANCH, Repository

    repository = Repository(hub, settings)
    path = manifest_path(_job_id(request, content))
    found = repository.read(path, BRANCH, MANIFEST_BYTES) if repository.exists() else None
    if found is None:
        return False
    with suppress(DatasetError):  # a manifest of another version
        manifest, contradictions = read_manifest(found, path)
        return not contradictions and _is_of(manifest, content)
    return False


def _is_of(manifest: Manifest, content: Content) -> bool:
    """Say whether a dataset holds `content`, which may have changed after its run got its id."""
    fingerprint, model = content
    identity = manifest.provenance.identity
    return identity.source_fingerprint == fingerprint and model.is_that_of(identity)


def _refused(detail: str, cure: str = "give an empty folder") -> OptionRefused:
    return OptionRefused(detail, field="--out", cure=cure)


def _unfinished(store: Store, request: ExtractRequest, out: Path) -> JobRow | None:
    """Return the job of an earlier run in `out`; none if it was killed before it had one.

    The planner decides whether the source is still the same, since it knows how much of it is planned.
    """
    newest, _ = store.read(jobs.page, limit=1)
    if not newest:
        return None
    row = newest[0]
    if store.read(jobs.request, row.id) != request:
        cure = "run that job's file, delete the folder, or give an empty one"
        raise _refused(f"{out} holds the unfinished run of another job ({row.id})", cure)
    return row
