"""The planning loop's body: one job from its lease to a finished plan; units run while it goes on."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from schemas.arrow import state_bytes, stored_token_bytes
from schemas.identity import Identity
from schemas.names import MAX_UNITS, plan_path
from schemas.request import CapturePasses, ExtractRequest, Generate
from service.errors import IllegalMove, LeaseLost, OptionRefused, Outcome, QuarryError, StoreUnavailable
from service.plan.plan_file import write_plan
from service.plan.planner import RowOutcome, UnitBounds, UnitDraft, plan_units
from service.plan.sources import RowSource, open_source
from service.plan.target import Target, inspect_target
from service.plan.tokenizing import outcomes
from service.plan.tokens import SampleTokenizer
from service.settings import Settings
from service.store import PlanLease, PlannedUnit, Store

SILENT_LEASES = 20
"""Planners that may vanish over one job, killed or crashed, before it waits for a person."""


def run_planning(store: Store, settings: Settings, owner: str, stop: Callable[[], bool]) -> bool:
    """Plan the oldest job that waits for it; return whether there was one.

    An error that is the request's or the model's fails the job, one that waits for a person blocks it. A
    passing one is left for the next lease; after `settings.unit_attempts` leases it blocks the job, and so
    does planning that ends again and again without a word. `resume` gives as many tries again. Raises
    StoreUnavailable where no job could even be leased.
    """
    lease = store.lease_plan(owner, settings.lease_s)
    if lease is None:
        return False
    try:
        if lease.epoch % SILENT_LEASES == 0:
            _stop_killing_planners(lease, store)
        else:
            plan_job(lease, store, settings, stop=stop)
    except (LeaseLost, StoreUnavailable):
        # Another planner has the job, or nothing can be recorded now: the lease runs out and is taken again.
        return True
    except QuarryError as error:
        _end(store, settings, lease, error)
    return True


def _stop_killing_planners(lease: PlanLease, store: Store) -> None:
    problem = QuarryError(
        f"planning ended {SILENT_LEASES - 1} times without a result",
        cure="look for the reason in the planner's log and the kernel's (memory), then resume",
    ).problem()
    store.block_job(lease.job_id, problem, lease=lease)


def _end(store: Store, settings: Settings, lease: PlanLease, error: QuarryError) -> None:
    try:
        if error.outcome is Outcome.FAIL:
            store.fail_job(lease.job_id, error.problem(), lease=lease)
        elif error.outcome is Outcome.BLOCK or lease.epoch % settings.unit_attempts == 0:
            store.block_job(lease.job_id, error.problem(), lease=lease)
    except (LeaseLost, IllegalMove, StoreUnavailable):
        # The job was cancelled or taken over meanwhile, or the next lease will meet the same error.
        return


def plan_job(lease: PlanLease, store: Store, settings: Settings, *, stop: Callable[[], bool]) -> bool:
    """Plan a job to its end and return true; false where `stop` said so before, and the next lease goes on.

    A plan made again writes the same bytes, so units that exist already stay as they are. Raises any
    QuarryError.
    """
    request = lease.request
    with _kept(lease, store, settings.lease_s) as check_lease:
        target = inspect_target(request, settings)
        tokenizer = SampleTokenizer(target, request)
        source = open_source(request.source, settings)
        identity = identity_of(request, target, tokenizer, source)
        check_lease()
        store.set_identity(lease, identity)
        rows = _while_held(outcomes(source, tokenizer), check_lease, stop)
        for unit, draft in enumerate(plan_units(rows, unit_bounds(request, target, settings))):
            if stop():
                return False
            if draft.samples:
                _add_unit(lease, store, settings, unit, draft)
            else:
                store.finish_plan(lease, draft.rejects)
                return True
        if stop():
            return False
        store.finish_plan(lease, ())
    return True


def _while_held(
    rows: Iterable[RowOutcome], check_lease: Callable[[], None], stop: Callable[[], bool]
) -> Iterator[RowOutcome]:
    """Pass rows on until `stop`; raises LeaseLost when it is known, not at the end of a long unit."""
    for row in rows:
        check_lease()
        if stop():
            return
        yield row


def identity_of(
    request: ExtractRequest, target: Target, tokenizer: SampleTokenizer, source: RowSource
) -> Identity:
    """Return what the dataset of `request` is. Raises what reading the source raises."""
    return Identity(
        model=target.model,
        revision=target.revision,
        dtype=target.dtype,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        layer_ids=target.layer_ids,
        tokenizer_sha256=tokenizer.tokenizer_sha256,
        template_sha256=tokenizer.template_sha256,
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
    about = (len(target.layer_ids), target.hidden_size, target.dtype)
    return UnitBounds(
        bytes_per_token=stored_token_bytes(*about, request.storage.compression) or state_bytes(1, *about),
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
    sha256 = write_plan(settings.work_root / plan_path(lease.job_id, unit), draft.samples)
    planned = PlannedUnit(unit, len(draft.samples), draft.num_tokens, sha256)
    store.add_unit(lease, planned, draft.rejects)


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
                store.extend_plan(lease, ttl_s)
            except StoreUnavailable:
                # Two thirds of the lease are left to come back in.
                continue
            except QuarryError as error:
                met.append(error)
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
