"""Makes a job from a body of `POST /extract` after the cheap checks."""

import shutil
from contextlib import AbstractContextManager, nullcontext

from schemas.job import Estimate
from schemas.request import ExtractRequest
from schemas.source import PostedSource
from service.control.request_body import CheckedRequest
from service.control.webhooks import check_webhook
from service.errors import DiskFull, OptionRefused, StoreUnavailable
from service.settings import Settings
from service.store import JobRow, NewJob, Store, jobs, keys

ALONE = nullcontext()
"""The turn in a process to which nobody else sends requests."""


def submit(
    body: CheckedRequest,
    key: str,
    store: Store,
    settings: Settings,
    priority: int = 0,
    owner: str | None = None,
    turn: AbstractContextManager[None] = ALONE,
) -> JobRow:
    """Return the job of an owner's idempotency `key`, which is made now if the key is new.

    An existing job is not checked again: its source may be gone by now, and the client only repeats itself.

    Raises:
        RequestError: model, layers, template or source cannot be used; it names the field.
        HubDenied: the Hub repository cannot be written to.
        HubUnavailable: the Hub does not answer, so the request cannot be checked.
        IdempotencyConflict: `key` was used with another request, or its job was deleted.
        QuotaExceeded: the owner already has as many jobs or bytes as allowed.
        DiskFull: too little space is free.
        ServiceBusy: the `turn` to check the request does not come in time.
    """
    made = NewJob.of(jobs.new_id(), key, body.request, priority, owner=owner, document=body.document)
    named = store.read(jobs.submitted, made)
    if named is not None:
        return named
    if owner is not None:
        store.write(keys.check_quota, owner)
    check_room(settings)
    check(body.request, settings, turn)
    return store.write(jobs.submit, made)[0]


def check_room(settings: Settings) -> None:
    """Raise DiskFull if the data folder is nearly full, StoreUnavailable if its disk cannot be looked at."""
    free_bytes = _free_bytes(settings)
    if free_bytes < settings.min_free_bytes:
        cure = "delete jobs or free space in the data folder, or lower QUARRY_MIN_FREE_BYTES"
        raise DiskFull(f"{free_bytes} bytes are free; {settings.min_free_bytes} must be", cure=cure)


def _free_bytes(settings: Settings) -> int:
    """Return the free space of the data folder's disk. Raises StoreUnavailable."""
    try:
        return shutil.disk_usage(settings.data_dir).free
    except OSError as error:
        detail = f"the data folder cannot be looked at: {error.strerror}"
        raise StoreUnavailable(detail, cure="fix the disk behind QUARRY_DATA_DIR") from error


def check_fits(request: ExtractRequest, needs: Estimate, settings: Settings) -> None:
    """Refuse a request whose shards stay in the data folder and exceed its free space.

    Raises DiskFull, StoreUnavailable.
    """
    room = max(0, _free_bytes(settings) - settings.min_free_bytes)
    if request.storage.stays and needs.stored_bytes is not None and needs.stored_bytes > room:
        detail = f"its {needs.samples} samples take up to {needs.stored_bytes} bytes; {room} are free"
        cure = "free space in the data folder, or push to a repository with keep_local false"
        raise DiskFull(detail, field="storage.keep_local", cure=cure)


def check_scratch(request: ExtractRequest, settings: Settings) -> None:
    """Refuse shards so large that those in flight alone exceed QUARRY_SCRATCH_BYTES. Raises OptionRefused."""
    if request.storage.stays or settings.scratch_bytes is None:
        return
    num_units = settings.units_in_flight + settings.units_in_proof
    if request.storage.shard_bytes * num_units > settings.scratch_bytes:
        detail = f"{num_units} shards of this size, which are captured at once, take more than "
        detail += f"QUARRY_SCRATCH_BYTES ({settings.scratch_bytes})"
        cure = f"make it at most {settings.scratch_bytes // num_units}, or raise QUARRY_SCRATCH_BYTES"
        raise OptionRefused(detail, field="storage.shard_bytes", cure=cure)


def check(
    request: ExtractRequest,
    settings: Settings,
    turn: AbstractContextManager[None] = ALONE,
    *,
    of_schedule: bool = False,
) -> None:
    """Check `request` without reading samples or weights; may ask the Hub.

    Untrusted content is read in a child, for at most `CHECK_S`. Only a request `of_schedule` may read posted
    samples, or a folder that has no files yet.

    Imports pyarrow and huggingface_hub on first use. Raises as `submit` does.
    """
    from service.plan.child.process import check_named
    from service.plan.sources import open_source, without_token
    from service.plan.target import fetch_target

    check_scratch(request, settings)
    check_webhook(request, settings)
    located, source = fetch_target(request, settings), None
    # Inline samples were already checked.
    if not (request.source.kind == "inline" or (of_schedule and isinstance(request.source, PostedSource))):
        source = without_token(open_source(request.source, settings, may_be_empty=of_schedule))
    with turn:
        check_named(request, located, source, settings)
    if request.hub is not None:
        from service.publish.push import check_target

        check_target(request.hub, settings)
