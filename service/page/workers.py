"""The page of workers: hosts, their workers, the models they rest from, and the data folder's disk."""

import shutil
from contextlib import suppress

from fastapi import Request, Response

from schemas.keys import Scope
from service.api.routes.resources import CallerOf, SettingsOf, StoreOf
from service.page.answers import page
from service.page.session import pages
from service.store import HOME, hosts, storing, workers

router = pages(Scope.METRICS)


@router.get("/ui/workers")
def workers_page(request: Request, store: StoreOf, settings: SettingsOf, asks: CallerOf) -> Response:
    """Show the workers by host; an error, which may quote the job that met it, only to who may see that."""
    disk = None
    with suppress(OSError):
        disk = shutil.disk_usage(settings.data_dir)
    waiting_bytes, _, _ = store.read(storing.unstored, HOME)
    return page(
        request,
        "workers.html",
        hosts=store.read(hosts.views),
        sick=store.read(workers.sick),
        sees=asks.sees,
        disk=disk,
        reserve=settings.min_free_bytes,
        scratch=settings.scratch_bytes,
        waiting_bytes=waiting_bytes,
        folder=str(settings.data_dir.resolve()),
    )
