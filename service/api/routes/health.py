"""GET /healthz, /readyz and /metrics: for probes and for Prometheus."""

import tempfile
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from schemas.job import Health
from service.api.problems import problem_responses
from service.api.routes.resources import NoOptions, SettingsOf, StoreOf
from service.errors import StoreUnavailable
from service.store import migration

router = APIRouter(tags=["health"])


@router.get("/healthz", responses=problem_responses(422))
async def healthz(options: Annotated[NoOptions, Query()]) -> Health:
    """Say that the process answers; asks nothing else."""
    return Health()


@router.get("/readyz", responses=problem_responses(422, 503))
def readyz(store: StoreOf, settings: SettingsOf, options: Annotated[NoOptions, Query()]) -> Health:
    """Say that jobs can be taken: the store has the right tables, and the data folder can be written."""
    store.read(migration.check)
    try:
        with tempfile.TemporaryFile(dir=settings.data_dir) as file:
            file.write(b"ready")
    except OSError as error:
        detail = f"the data folder cannot be written: {error.strerror}"
        raise StoreUnavailable(detail, cure="mend the disk behind QUARRY_DATA_DIR") from error
    return Health()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problem_responses(422, 503)},
)
def metrics(request: Request, options: Annotated[NoOptions, Query()]) -> Response:
    """Send the metrics in Prometheus' text format."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
