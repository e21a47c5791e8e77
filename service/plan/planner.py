"""The planning loop's body: one job from its lease to a finished plan; units run while it goes on."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.dataset.columns import state_bytes, stored_token_bytes
from schemas.dataset.seal import sha256_of
from schemas.identity import Identity
from schemas.job import RejectView
from schemas.names import MAX_UNITS, plan_path
from schemas.request import CapturePasses, ExtractRequest, FileSource, Generate, HubSource, InlineSource
from service.errors import STORE_AWAY, IllegalMove, LeaseLost, OptionRefused, QuarryError
from service.plan.child.process import tokenizing
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.plan.sources import RowSource, open_source
from service.plan.target import Target, inspect_target, planned_target
from service.plan.unit_file import write_plan
from service.plan.units import UnitBounds, UnitDraft, plan_units
from service.settings import Settings
from service.store import PlanLease, PlannedUnit, Store

logger = logging.getLogger(__name__)

MAX_TOLD_CHARS = 500
"""The longest that an error of nobody's making may be told in a job's problem."""


def run_planning(store: Store, settings: Settings, owner: str, stop: Callable[[], bool]) -> bool:
    """Plan the oldest job that waits for it; return whether there was one.

    An error that is the request's or the model's fails the job, and so does one that nobody foresaw; one that
    waits for a person blocks it. A passing one is left for the next lease; after `settings.unit_attempts`
    of them the job is blocked. `resume` gives as many tries again.
    """
    try:
        lease = store.lease_plan(owner, settings.lease_s)
    except STORE_AWAY as error:
        logger.warning("no job can be planned: %s", error)
        return False
    if lease is None:
        return False
    try:
        plan_job(lease, store, settings, stop=stop)
    except QuarryError as error:
        _end(store, settings, lease, error)
    except Exception as error:
        # Supervisor: without a word the job would end one planner after another, and nobody learned why.
        logger.exception("job %s", lease.job_id)
        _end(store, settings, lease, _internal(error))
    return True


def _internal(error: Exception) -> QuarryError:
    # What is raised may quote what a user wrote: as ASCII it can stand in any database.
    told = ascii(error)[:MAX_TOLD_CHARS]
    return QuarryError(f"internal error: {told}", cure="look for the traceback in the planner's log")


def _end(store: Store, settings: Settings, lease: PlanLease, error: QuarryError) -> None:
    # Else the job was cancelled or taken over meanwhile, or the next lease will meet the same error.
    with suppress(LeaseLost, IllegalMove, *STORE_AWAY):
        store.fail(lease, error.problem(), error.outcome, settings.unit_attempts)


def plan_job(lease: PlanLease, store: Store, settings: Settings, *, stop: Callable[[], bool]) -> bool:
    """Plan a job to its end and return true; false where `stop` said so before, and the next lease goes on.

    A plan made again writes the same bytes, so units that exist already stay as they are. What the Hub's
    branches name may move while a plan is made: where the identity is fixed, model and dataset are read at
    its commits. Raises any QuarryError.
    """
    request, fixed = lease.request, lease.identity
    with _kept(lease, store, settings.lease_s) as check_lease:

        def watch() -> None:
            check_lease()
            if stop():
                raise _Stopped

        target = planned_target(request, fixed, settings) if fixed else inspect_target(request, settings)
        source = open_source(_pinned(request.source, fixed), settings)
        with suppress(_Stopped), tokenizing(request, target, source, settings, watch) as child:
            identity = identity_of(request, target, source, child.template_sha256())
            check_lease()
            store.set_identity(lease, identity)
            rejects: tuple[RejectView, ...] = ()
            for unit, draft in enumerate(plan_units(child.rows(), unit_bounds(request, target, settings))):
                watch()
                if draft.samples:
                    _add_unit(lease, store, settings, unit, draft)
                else:
                    rejects = draft.rejects
            store.finish_plan(lease, rejects)
            return True
    return False


class _Stopped(Exception):
    """The planner was asked to end."""


def _pinned(
    source: InlineSource | FileSource | HubSource, fixed: Identity | None
) -> InlineSource | FileSource | HubSource:
    """Return a Hub source at the commit that its fixed fingerprint names; every other source as it is."""
    if fixed is None or not isinstance(source, HubSource):
        return source
    named = re.match(rf"hub:{re.escape(source.repo_id)}@([0-9a-f]+):", fixed.source_fingerprint)
    return source if named is None else source.model_copy(update={"revision": named[1]})


def identity_of(
    request: ExtractRequest, target: Target, source: RowSource, template_sha256: str | None
) -> Identity:
    """Return what the dataset of `request` is. Raises what reading the source raises."""
    return Identity(
        model=target.model,
        revision=target.revision,
        dtype=target.dtype,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        layer_ids=target.layer_ids,
        tokenizer_sha256=files_digest(target.folder, TOKENIZER_FILES),
        template_sha256=template_sha256,
        source_fingerprint=source.fingerprint(),
        loss=request.loss,
        max_tokens=request.max_tokens,
        on_too_long=request.on_too_long,
        generate=request.generate,
        capture=resolve_capture(request.generate),
        compression=request.storage.compression,
    )


def resolve_capture(generate: Generate | None) -> CapturePasses | None:
    """Return how answers are captured; null where nothing is generated.

    `auto` is one pass: the engine is run without asynchronous scheduling for such jobs, and then it is right.
    Only a stop string, which aborts the request from outside the engine, takes a second prefill.
    """
    if generate is None:
        return None
    if generate.capture != "auto":
        return generate.capture
    return "second_prefill" if generate.stop else "one_pass"


def unit_bounds(request: ExtractRequest, target: Target, settings: Settings) -> UnitBounds:
    """Return the size of this job's units: one shard each, or the most samples that a unit may have.

    Where what is stored depends on the states themselves, they count as they were captured.
    """
    shape = (len(target.layer_ids), target.hidden_size, target.dtype)
    return UnitBounds(
        bytes_per_token=stored_token_bytes(*shape, request.storage.compression) or state_bytes(1, *shape),
        unit_bytes=request.storage.shard_bytes,
        max_samples=settings.unit_max_samples,
        answer_tokens=request.generate.max_tokens if request.generate else 0,
    )


def _add_unit(lease: PlanLease, store: Store, settings: Settings, unit: int, draft: UnitDraft) -> None:
    if unit >= MAX_UNITS:
        raise OptionRefused(
            f"the job would have more than {MAX_UNITS} shards",
            field="storage.shard_bytes",
            cure="make the shards larger, or split the source",
        )
    path = settings.work_root / plan_path(lease.job_id, unit)
    if unit < len(lease.plan_sha256s):
        sha256 = _write_again(path, draft, lease.plan_sha256s[unit])
    else:
        sha256 = write_plan(path, draft.samples)
    planned = PlannedUnit(unit, len(draft.samples), draft.num_tokens, sha256)
    store.add_unit(lease, planned, draft.rejects)


def _write_again(path: Path, draft: UnitDraft, planned_sha256: str) -> str:
    """Return the digest of the plan of a unit that is there; write it only where it is the same plan.

    An attempt may be reading the file: another plan beside it is refused by the store, and leaves it alone.
    """
    beside = path.with_name(f"again-{path.name}")
    sha256 = write_plan(beside, draft.samples)
    beside.unlink()
    if sha256 == planned_sha256 and not _holds(path, sha256):
        write_plan(path, draft.samples)
    return sha256


def _holds(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path)[0] == sha256
    except OSError:
        return False


@contextmanager
def _kept(lease: PlanLease, store: Store, ttl_s: float) -> Iterator[Callable[[], None]]:
    """Extend the lease from a thread: a download or the hash of a large source outlasts it.

    Yields a function that raises what the thread met, LeaseLost above all.
    """
    done = threading.Event()
    met: list[QuarryError] = []

    def extend() -> None:
        while not done.wait(ttl_s / 3):
            try:
                lost = store.extend([lease], ttl_s)
            except STORE_AWAY:
                # Two thirds of the lease are left to come back in.
                continue
            if lost:
                met.append(LeaseLost(f"{lease.owner} no longer plans job {lease.job_id}"))
                return

    def check() -> None:
        if met:
            raise met[0]

    thread = threading.Thread(target=extend, name=f"lease-{lease.job_id}", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        done.set()
        thread.join()
