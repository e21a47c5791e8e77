"""The publisher: completes the dataset of a finished job, pushes it if requested, and completes the job."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from schemas.dataset.manifest import CanaryReport, CanaryState
from schemas.dataset.seal import make_folder
from schemas.names import MANIFEST_FOLDER, is_job_id
from schemas.request import ExtractRequest, HubTarget
from service.artifacts.repository import Patience, Repository
from service.capture.attempt_files import land, remove_stored
from service.errors import STORE_AWAY, DatasetBroken, LeaseLost, writing
from service.publish.assemble import account_of, assemble
from service.publish.push import JobPush
from service.publish.pushed_to import pushed_to
from service.settings import Settings
from service.store import PublishLease, Store, canaries, commits, jobs, publishing
from service.work.keeper import Kept, Stopped
from service.work.runner import LoopContext, run_next


def run_publishing(context: LoopContext, *, patience: Patience | None = None, unpushed: bool = False) -> bool:
    """Publish one job if one is ready, however long the upload takes; return whether there was one.

    Errors are recorded in the job: it fails, is blocked with everything kept, or reports the error and is
    retried.
    """
    store, settings = context.store, context.settings

    def publish(lease: PublishLease, kept: Kept) -> None:
        def advance() -> None:
            # A push needs no database: what cannot be recorded now is recorded after the next commit.
            with suppress(*STORE_AWAY):
                store.write(publishing.advance, lease)

        with writing("the finished dataset"):
            commit = _publish(store, settings, lease, kept.confirm, advance, patience)
            store.write(publishing.complete, lease, commit)
            remove_stored(store, settings, lease.job_id)

    take = partial(publishing.lease, store, context.owner, settings.lease_s, unpushed=unpushed)
    return run_next(context, take, publish, settings.publish_attempts)


run_local_publishing = partial(run_publishing, unpushed=True)
"""The same for jobs that are not pushed, which need not wait for the uploads of others."""


def publish_folder(folder: Path, hub: HubTarget, settings: Settings, patience: Patience | None = None) -> str:
    """Push every job of a complete dataset folder; return the last commit. Files already there are skipped.

    Raises DatasetBroken if there is no manifest, and what `JobPush` raises.
    """
    jobs = sorted(path.stem for path in (folder / MANIFEST_FOLDER).glob("*.json") if is_job_id(path.stem))
    if not jobs:
        raise DatasetBroken(f"{folder} holds no manifest", cure="give the folder of a finished dataset")
    remote = Repository(hub, settings, patience)
    return [JobPush(remote, folder, job_id).run() for job_id in jobs][-1]


def _publish(
    store: Store,
    settings: Settings,
    lease: PublishLease,
    check: Callable[[], None],
    advance: Callable[[], None],
    patience: Patience | None,
) -> str | None:
    """Return the commit that holds the job, or None if it is not pushed or has nothing new."""
    if store.read(jobs.job, lease.job_id).progress.wrote_nothing_new:
        return None
    dataset = settings.dataset_dir(lease.job_id)
    request = store.read(jobs.request, lease.job_id)
    account = account_of(store, lease, request)
    land(store, settings, account.commits)
    # Nothing may have landed here. Before the lease is looked at: a deletion that comes later removes it, and
    # nobody else makes it anew.
    make_folder(dataset)
    try:
        check()
    except (LeaseLost, Stopped):
        with suppress(OSError):
            dataset.rmdir()
        raise
    norm = store.read(commits.final_norm, lease.job_id)
    canary, report = _canary(store, lease, request)
    assemble(dataset, account, norm, canary, report)
    check()
    if request.hub is None:
        return None
    hub = Repository(pushed_to(store, lease.job_id, lease.identity, request.hub), settings, patience)
    return JobPush(hub, dataset, lease.job_id, check, advance).run()


def _canary(
    store: Store, lease: PublishLease, request: ExtractRequest
) -> tuple[CanaryState, CanaryReport | None]:
    """Return what the manifest says about the canary, and the report of the canary that passed."""
    if request.canary == "skip":
        return "skipped by request", None
    made = lease.provenance
    report = None if made is None else store.read(canaries.report, canaries.canary_digest(made))
    if report is None:
        raise DatasetBroken("no canary is recorded for this model and engine", cure="resume the job")
    return "passed" if report.job_id == lease.job_id else "cached", report
