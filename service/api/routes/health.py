"""GET /healthz, /readyz and /metrics: for probes and for Prometheus."""

import tempfile

from anyio import to_thread
from fastapi import APIRouter, Request, Response, Security
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from schemas.job import Health, Readiness
from schemas.keys import Scope
from service.api.auth import caller
from service.api.head_route import HeadRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_QUERY
from service.api.routes.resources import SettingsOf, StoreOf
from service.errors import StoreUnavailable
from service.settings import Settings
from service.store import Store, migration

router = APIRouter(tags=["health"], dependencies=NO_QUERY, route_class=HeadRoute)


@router.get("/healthz", responses=problem_responses(422))
async def healthz() -> Health:
    """Report that the process is alive; checks nothing else."""
    return Health()


@router.get("/readyz", responses=problem_responses(422, 503))
async def readyz(request: Request, store: StoreOf, settings: SettingsOf) -> Readiness:
    """Report that jobs can be taken: the database has the right tables, the data folder is writable."""
    # In threads of its own: a probe does not wait behind submissions.
    await to_thread.run_sync(_check_ready, store, settings, limiter=request.app.state.probe_threads)
    return Readiness(workers_lost=request.app.state.workers_lost())


def _check_ready(store: Store, settings: Settings) -> None:
    store.read(migration.check)
    try:
        with tempfile.TemporaryFile(dir=settings.data_dir) as file:
            file.write(b"ready")
    except OSError as error:
        detail = f"the data folder cannot be written: {error.strerror}"
        raise StoreUnavailable(detail, cure="fix the disk behind QUARRY_DATA_DIR") from error


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[Security(caller, scopes=[Scope.METRICS])],
    responses={200: {"content": {"text/plain": {}}}, **problem_responses(401, 403, 422, 429, 503)},
)
def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
