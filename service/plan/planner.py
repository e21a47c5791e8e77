"""The body of the planning loop: one job from its lease to a finished plan; units run meanwhile."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from schemas.dataset.columns import state_bytes, stored_token_bytes
from schemas.dataset.seal import make_folder, sealing
from schemas.digest import canonical_sha256
from schemas.generate import CapturePasses, Generate
from schemas.identity import Identity
from schemas.names import MAX_UNITS, frozen_source_path, is_local_model, known_hashes_path, posted_path
from schemas.request import ExtractRequest
from schemas.schedule import ChangedRecipe
from schemas.source import PostedSource
from service.artifacts.folder_limit import check_folder
from service.errors import (
    IdentityChanged,
    LeaseLost,
    OptionRefused,
    RecipeChanged,
    SourceRefused,
    WriteFailed,
    writing,
)
from service.plan.child.fork_server import FORK_SERVER
from service.plan.child.process import Opening, tokenizing
from service.plan.child.task import Purpose, Task
from service.plan.content_hashes import SeenHashes, write_hashes
from service.plan.model_folder import (
    TOKENIZER_FILES,
    ModelContent,
    content_of,
    files_digest,
    locate_model,
    weight_roots_of,
)
from service.plan.posted import take
from service.plan.sources import RowSource, open_source
from service.plan.target import Target, check_planned, target_of
from service.plan.unit_plan import packed
from service.plan.units import DRAFT_REJECTS, UnitBounds, UnitDraft, plan_units
from service.settings import Settings
from service.store import PlanLease, PlannedUnit, Store, captured_samples, jobs, plans, runs, spools, tasks
from service.work.keeper import Kept
from service.work.runner import LoopContext, run_next

GIVE_WAY_S = 1.0
"""How often a planner checks for a waiting job of higher priority."""
MAX_WAITING = 3
"""Maximum plans in one thread that wait for others; each keeps its child."""


def run_planning(context: LoopContext, waiting: tuple[str, ...] = ()) -> bool:
    """Plan one pass of the oldest job of the highest priority; return whether there was one.

    If a job of higher priority arrives meanwhile, that one is planned first. `waiting` are the jobs whose
    plans wait for this one, with their leases and children; the last has the highest priority.
    """
    store, settings = context.store, context.settings
    FORK_SERVER.warm()

    def work(lease: PlanLease, kept: Kept) -> None:
        looked_s = time.monotonic()

        def watch() -> None:
            nonlocal looked_s
            kept.check()
            if len(waiting) < MAX_WAITING and time.monotonic() - looked_s > GIVE_WAY_S:
                while run_planning(context, (*waiting, lease.job_id)):
                    kept.check()
                looked_s = time.monotonic()

        plan_job(lease, store, settings, watch)

    outranking = waiting[-1] if waiting else None
    take = partial(plans.lease, store, context.owner, settings.lease_s, outranking=outranking)
    attempts = settings.unit_attempts, settings.publish_attempts
    return run_next(context, take, work, *attempts)


def plan_job(lease: PlanLease, store: Store, settings: Settings, watch: Callable[[], None]) -> None:
    """Plan one whole pass over a job's source.

    Planning again gives the same bytes, so existing units stay as they are. Branches on the Hub may move
    during planning: once the identity is fixed, model and dataset are read at its commits. Raises any
    QuarryError, and what `watch`, which is called several times a second, raises.
    """
    settings = settings.narrowed(lease.grants)
    request, fixed = store.read(jobs.request, lease.job_id), lease.identity
    if request.hub is not None:
        settings.check_push(request.hub.repo_id)
    revision = request.revision if fixed is None or is_local_model(request.model) else fixed.revision
    located = locate_model(request.model, revision, settings)
    model = content_of(located, watch)
    if fixed is not None:
        check_planned(lease.model, model, fixed)
    source, frozen_path = _opened(lease, request, store, settings, watch)
    task = Task(Purpose.PLAN, request, located, settings.model_roots, weight_roots_of(settings), source)
    with tokenizing(task, settings, watch) as child:
        opening = child.opening()
        target = target_of(request, located, opening.config)
        if files_digest(target.folder, TOKENIZER_FILES) != model.tokenizer_sha256:
            detail = f"the tokenizer of {lease.model} was changed while it was loaded"
            raise IdentityChanged(detail, field="model", cure="resume when nobody writes to it any more")
        if frozen_path is not None:
            # Another planner may have fixed other files meanwhile, and no transaction fences this file.
            store.write(tasks.held, lease)
            with writing(f"the file {frozen_path.name}"), sealing(frozen_path, str(lease.epoch)) as temporary:
                temporary.write_text(json.dumps(opening.source))
        identity = identity_of(request, target, model, opening)
        watch()
        store.write(plans.set_identity, lease, identity)
        rest = UnitDraft((), ())
        rows = (
            replace(row, position=lease.first_position + row.position)
            for row in child.rows(_known_hashes(lease, store, settings, identity))
        )
        bounds, seen = unit_bounds(request, target, settings), SeenHashes(settings.work_root)
        unit, num_shards = lease.first_unit, 0
        for draft in plan_units(rows, bounds, seen.add):
            watch()
            if draft.samples:
                num_shards += min(settings.tensor_parallel_size, len(draft.samples))
                if request.hub is not None:
                    check_folder(num_shards)
                _add_unit(lease, store, unit, draft)
                unit += 1
            elif len(draft.rejects) == DRAFT_REJECTS:
                store.write(plans.add_rejected, lease, draft.rejects, draft.known)
            else:
                rest = draft
        is_last = request.repeat != "forever" and lease.item + 1 >= request.repeat
        store.write(plans.finish, lease, rest.rejects, rest.known, is_last=is_last)


def _known_hashes(lease: PlanLease, store: Store, settings: Settings, identity: Identity) -> Path | None:
    """Return a file of hashes that the schedule's earlier runs captured, None if the job takes all samples.

    It is written once, so that planning again skips the same samples. Raises SourceRefused if the schedule is
    gone, RecipeChanged, DiskFull, WriteFailed.
    """
    path = settings.work_root.resolve() / known_hashes_path(lease.job_id)
    if path.exists():
        return path
    if lease.schedule is None:
        if lease.spool is not None:  # takes everything that was posted, which may be nothing
            write_hashes(path, (), str(lease.epoch))
        return None if lease.spool is None else path
    recipe = identity.recipe_sha256()
    earlier = store.read(captured_samples.earlier, lease.schedule, lease.job_id, recipe)
    if earlier is None:
        detail = "the schedule was deleted before the job was planned, and with it which samples are new"
        raise SourceRefused(detail, field="source", cure="submit the request, which then takes all samples")
    if earlier.identity is not None and earlier.identity.recipe_sha256() != recipe:
        changed = [name for name in earlier.identity.differences(identity) if name != "source_fingerprint"]
        detail = f"{', '.join(changed)} changed since job {earlier.last}"
        if earlier.rules.changed_recipe is ChangedRecipe.REFUSE:
            cure = "restore it before the next run, or change changed_recipe to begin_anew and resume"
            raise RecipeChanged(detail, field="changed_recipe", cure=cure)
        store.write(runs.note, lease.job_id, f"begun anew: {detail}")
    parts = (store.read(captured_samples.hashes, lease.schedule, recipe, job_id) for job_id in earlier.jobs)
    write_hashes(path, parts, str(lease.epoch))
    return path


def _opened(
    lease: PlanLease, request: ExtractRequest, store: Store, settings: Settings, watch: Callable[[], None]
) -> tuple[RowSource, Path | None]:
    """Open a job's source; if the job has an identity, as it was then, since it may have grown.

    The path is where to write the file that fixes the source's content; None if that is done already.

    Raises SourceRefused, HubUnavailable, DiskFull, WriteFailed.
    """
    path = settings.work_root / frozen_source_path(lease.job_id)
    is_posted = isinstance(request.source, PostedSource)
    is_begun = lease.identity is not None or (is_posted and path.exists())
    if is_posted and not is_begun:
        _take_posted(lease, store, settings, watch)
    opened = open_source(
        request.source,
        settings,
        _read_frozen(path) if is_begun else None,
        labels=request.labels,
        may_be_empty=is_begun or lease.schedule is not None,
        posted=settings.work_root.resolve() / posted_path(lease.job_id),
        number=lease.item,
    )
    return opened, None if is_begun else path


def _read_frozen(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        cure = "restore the data folder, or submit a new job"
        detail = f"{path.name}, which says what the job's source was, cannot be read: {error}"
        raise WriteFailed(detail, cure=cure) from error


def _take_posted(lease: PlanLease, store: Store, settings: Settings, watch: Callable[[], None]) -> None:
    """Take the posted samples that wait for the job.

    Raises SourceRefused if its schedule is gone, LeaseLost, DiskFull, WriteFailed.
    """
    if lease.spool is None:
        detail = "the schedule was deleted before its samples were taken, and they with it"
        raise SourceRefused(detail, field="source.kind", cure="post them to another schedule")
    taken = settings.work_root / posted_path(lease.job_id)
    with writing("the posted samples"):
        # Before the lease is checked: a later deletion removes the folder, and then nothing is moved.
        make_folder(taken)
    try:
        earlier = store.write(spools.leaving, lease)
    except LeaseLost:
        with suppress(OSError):
            taken.rmdir()
            taken.parent.rmdir()
        raise
    take(settings, lease.spool, lease.job_id, earlier, watch)


def identity_of(
    request: ExtractRequest,
    target: Target,
    model: ModelContent,
    opening: Opening,
) -> Identity:
    """Return the identity of the dataset of `request`."""
    return Identity(
        model=target.model,
        revision=model.revision,
        weights_sha256=model.weights_sha256,
        dtype=target.dtype,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        layer_ids=target.layer_ids,
        tokenizer_sha256=model.tokenizer_sha256,
        template_sha256=opening.template_sha256,
        source_fingerprint=str(opening.fingerprint),
        part=request.part,
        loss=request.loss,
        max_tokens=request.max_tokens,
        on_too_long=request.on_too_long,
        chat_template_kwargs=request.chat_template_kwargs,
        tools_sha256=canonical_sha256(request.tools) if request.tools else None,
        min_supervised_tokens=request.min_supervised_tokens,
        labels=request.label_names,
        duplicates=request.duplicates,
        generate=request.generate,
        capture=resolve_capture(request.generate),
        compression=request.storage.compression,
    )


def resolve_capture(generate: Generate | None) -> CapturePasses | None:
    """Return how answers are captured; None if nothing is generated.

    `auto` means one pass, which is correct because the engine runs without asynchronous scheduling for such
    jobs. A second prefill is needed with stop strings, which abort the request from outside the engine, and
    for answers that may not be stored as sampled.
    """
    if generate is None:
        return None
    if generate.capture != "auto":
        return generate.capture
    return "one_pass" if generate.keeps_answers and not generate.stop else "second_prefill"


def unit_bounds(request: ExtractRequest, target: Target, settings: Settings) -> UnitBounds:
    """Return the bounds of this job's units: one shard each, and a maximum number of samples.

    If the stored size depends on the states' values, their captured size is used.
    """
    shape = (len(target.layer_ids), target.hidden_size, target.dtype)
    return UnitBounds(
        bytes_per_token=stored_token_bytes(*shape, request.storage.compression) or state_bytes(1, *shape),
        unit_bytes=request.storage.shard_bytes,
        max_samples=settings.unit_max_samples,
        answer_tokens=request.generate.longest_answer if request.generate else 0,
        duplicates=request.duplicates,
    )


def _add_unit(lease: PlanLease, store: Store, unit: int, draft: UnitDraft) -> None:
    if unit >= MAX_UNITS:
        detail = f"the job would have more than {MAX_UNITS} shards"
        cure = "make the shards larger, or split the source"
        raise OptionRefused(detail, field="storage.shard_bytes", cure=cure)
    planned = PlannedUnit(unit, len(draft.samples), draft.num_tokens, packed(draft.samples))
    store.write(plans.add_unit, lease, planned, draft.rejects, draft.known)
