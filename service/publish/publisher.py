"""The publisher: completes the dataset of a finished job, pushes it where it was asked for, ends the job."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from schemas.dataset.manifest import CanaryReport
from schemas.identity import Identity
from schemas.names import is_job_id
from schemas.request import ExtractRequest, HubTarget
from service.capture.landing import land
from service.errors import (
    STORE_AWAY,
    DatasetBroken,
    Outcome,
    QuarryError,
    writing,
)
from service.publish.assemble import account_of, assemble
from service.publish.hub import Patience, check_target, open_hub
from service.publish.push import push_job
from service.settings import Settings
from service.store import PublishLease, Store
from service.work.keeper import Keeper, Kept
from service.work.runner import Stopped, run_next

__all__ = ["check_target", "publish_folder", "run_publishing"]

FinalNormOf = Callable[[ExtractRequest, Identity, Settings], bytes]


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
    keeper: Keeper | None = None,
    final_norm: FinalNormOf = target_final_norm,
    patience: Patience | None = None,
) -> bool:
    """Publish one job if one is ready, however long its upload takes; return whether there was one.

    What goes wrong ends in the job: failed, blocked with everything kept, or reported in a job that is tried
    again. Without a `keeper` of the process, one is started for this call.
    """
    reached = 0
    """How far the push has got: as `Delay.reached`."""

    def publish(lease: PublishLease, kept: Kept) -> None:
        nonlocal reached
        reached = 0

        def check() -> None:
            kept.confirm(stopped)
            if stopped():
                raise Stopped

        def advance(to: int) -> None:
            nonlocal reached
            reached = to
            # An upload needs no database: what cannot be recorded now is after the next group of files.
            with suppress(*STORE_AWAY):
                store.advance_publish(lease, to)

        with writing("the finished dataset"):
            commit = _publish(store, settings, lease, check, advance, final_norm, patience)
            store.complete_job(lease, commit)

    def fail(lease: PublishLease, error: QuarryError) -> None:
        if error.outcome in {Outcome.FAIL, Outcome.BLOCK}:
            store.fail(lease, error.problem(), error.outcome, settings.unit_attempts)
        else:
            store.delay_publish(lease, error.problem(), reached, settings.publish_deadline_s)

    with nullcontext(keeper) if keeper else Keeper(store, settings.lease_s) as kept_by:
        return run_next(
            store,
            kept_by,
            take=lambda: store.lease_publish(owner, settings.lease_s),
            work=publish,
            fail=fail,
            stopped=stopped,
        )


def publish_folder(folder: Path, hub: HubTarget, settings: Settings, patience: Patience | None = None) -> str:
    """Push every job of a complete dataset folder; return the last commit. What is there is not sent again.

    Raises DatasetBroken where there is no manifest, and what `push_job` raises.
    """
    jobs = sorted(path.stem for path in (folder / "manifests").glob("*.json") if is_job_id(path.stem))
    if not jobs:
        raise DatasetBroken(f"{folder} holds no manifest", cure="give the folder of a finished dataset")
    remote = open_hub(hub, settings, patience)
    return [push_job(remote, folder, job_id) for job_id in jobs][-1]


def _publish(
    store: Store,
    settings: Settings,
    lease: PublishLease,
    check: Callable[[], None],
    advance: Callable[[int], None],
    final_norm: FinalNormOf,
    patience: Patience | None,
) -> str | None:
    """Return the commit that holds the job, or none where no repository was asked for."""
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
    return push_job(hub, dataset, lease.job_id, check, advance)


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
