"""The publisher: completes the dataset of a finished job, pushes it where it was asked for, ends the job."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from schemas.dataset.manifest import CanaryReport
from schemas.identity import Identity
from schemas.names import is_job_id
from schemas.request import ExtractRequest, HubTarget
from service.capture.landing import land
from service.errors import (
    STORE_AWAY,
    DatasetBroken,
    IllegalMove,
    LeaseLost,
    Outcome,
    QuarryError,
    writing,
)
from service.publish.assemble import account_of, assemble
from service.publish.hub import Patience, check_target, open_hub
from service.publish.lease_keeper import LeaseKeeper
from service.publish.push import push_job
from service.settings import Settings
from service.store import PublishLease, Store

__all__ = ["check_target", "publish_folder", "run_publishing"]

logger = logging.getLogger(__name__)

FinalNormOf = Callable[[ExtractRequest, Identity, Settings], bytes]


class Stopped(Exception):
    """The service ends, and the next process continues."""


def target_final_norm(request: ExtractRequest, identity: Identity, settings: Settings) -> bytes:
    """Return `final_norm.safetensors` of the captured model. Raises IdentityChanged, UnknownModel."""
    from service.plan.target import planned_target
    from service.plan.weights import fetch_weights
    from service.proof.head import final_norm_bytes

    target = planned_target(request, identity, settings)
    return final_norm_bytes(fetch_weights(target, settings))


def run_publishing(
    store: Store,
    settings: Settings,
    owner: str,
    stopped: Callable[[], bool],
    *,
    final_norm: FinalNormOf = target_final_norm,
    patience: Patience | None = None,
) -> bool:
    """Publish one job if one is ready, however long its upload takes; return whether there was one.

    What goes wrong ends in the job: failed, blocked with everything kept, or told of in a job that is left to
    the next lease.
    """
    try:
        lease = store.lease_publish(owner, settings.lease_s)
    except STORE_AWAY as error:
        logger.warning("no job can be published: %s", error)
        return False
    if lease is None:
        return False
    course = _Course(store, lease)
    try:
        with LeaseKeeper(store, lease, settings.lease_s) as keeper, writing("the finished dataset"):
            check = partial(_check, keeper, stopped)
            commit = _publish(store, settings, course, check, final_norm, patience)
            store.complete_job(lease, commit)
    except (LeaseLost, Stopped):
        logger.info("job %s is left to another publisher", lease.job_id)
    except QuarryError as error:
        _end(store, settings, course, error)
    except Exception as error:
        # Supervisor: one job's bug must not end the publishing of all others.
        logger.exception("job %s", lease.job_id)
        _end(store, settings, course, QuarryError(f"internal error: {type(error).__name__}"))
    return True


def publish_folder(folder: Path, hub: HubTarget, settings: Settings, patience: Patience | None = None) -> str:
    """Push every job of a complete dataset folder; return the last commit. What is there is not sent again.

    Raises DatasetBroken where there is no manifest, and what `push_job` raises.
    """
    jobs = sorted(path.stem for path in (folder / "manifests").glob("*.json") if is_job_id(path.stem))
    if not jobs:
        raise DatasetBroken(f"{folder} holds no manifest", cure="give the folder of a finished dataset")
    remote = open_hub(hub, settings, patience)
    return [push_job(remote, folder, job_id) for job_id in jobs][-1]


def _check(keeper: LeaseKeeper, stopped: Callable[[], bool]) -> None:
    keeper.check()
    if stopped():
        raise Stopped


class _Course:
    """One lease's way through publishing: how far its push has got, told to the store as it goes."""

    def __init__(self, store: Store, lease: PublishLease) -> None:
        self.lease, self.reached = lease, 0
        self._store = store

    def advance(self, reached: int) -> None:
        """Take back what was told of a delay, once the push is beyond it. Raises LeaseLost."""
        self.reached = reached
        # An upload needs no database: what could not be told now is told after the next group of files.
        with suppress(*STORE_AWAY):
            self._store.advance_publish(self.lease, reached)


def _publish(
    store: Store,
    settings: Settings,
    course: _Course,
    check: Callable[[], None],
    final_norm: FinalNormOf,
    patience: Patience | None,
) -> str | None:
    """Return the commit that holds the job, or none where no repository was asked for."""
    lease = course.lease
    dataset = settings.dataset_dir(lease.job_id)
    land(store, settings, lease.job_id)
    account = account_of(store, lease)
    check()
    norm = final_norm(lease.request, lease.identity, settings)
    canary, report = _canary(store, lease)
    assemble(dataset, account, norm, canary, report, check)
    check()
    if lease.request.hub is None:
        return None
    hub = open_hub(lease.request.hub, settings, patience)
    return push_job(hub, dataset, lease.job_id, check, course.advance)


def _canary(store: Store, lease: PublishLease) -> tuple[str, CanaryReport | None]:
    """Return what the manifest says of the canary, and the numbers of the one that passed."""
    from service.proof.canary import canary_key

    if lease.request.canary == "skip":
        return "skipped by request", None
    stored, made = None, lease.provenance
    if made is not None:
        stored = store.canary(canary_key(made)) or store.canary(canary_key(made, versioned=False))
    if stored is None:
        raise DatasetBroken("no canary is recorded for this model and engine", cure="resume the job")
    report = CanaryReport.model_validate_json(stored)
    return "passed" if report.job_id == lease.job_id else "cached", report


def _end(store: Store, settings: Settings, course: _Course, error: QuarryError) -> None:
    """Let the error's class decide; one that may pass is told and tried again, but not for ever."""
    lease, problem = course.lease, error.problem()
    logger.warning("job %s was not published: %s", lease.job_id, problem.detail)
    try:
        if error.outcome in {Outcome.FAIL, Outcome.BLOCK}:
            store.fail(lease, problem, error.outcome, settings.unit_attempts)
        else:
            store.delay_publish(lease, problem, course.reached, settings.publish_deadline_s)
    except (LeaseLost, IllegalMove, *STORE_AWAY) as lost:
        logger.info("job %s: %s", lease.job_id, lost)
