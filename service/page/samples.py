"""The page of a sample: its tokens coloured by its mask, and the size of its states at each layer."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

from fastapi import Path as PathPart, Request, Response
from starlette.concurrency import run_in_threadpool

from schemas.dataset.entries import ShardEntry
from schemas.job import UnitView
from schemas.keys import Scope
from schemas.names import MAX_UNITS
from schemas.receipts import AttemptId
from service import apart
from service.api.routes.resources import BudgetOf, CallerOf, JobOf, SettingsOf, StoreOf
from service.capture.attempt_files import sealed_files
from service.control.budget import Turn
from service.errors import DatasetBroken, NotFound, ServiceBusy
from service.page.answers import page
from service.page.session import pages
from service.page.stored_row import ShownRow, shown_row
from service.report.chart import TOP, WIDTH, Axis, Chart, spanning
from service.report.wording import number
from service.settings import Settings
from service.store import JobRow, Store, UnitFiles, commits

DEADLINE_S = 20.0
COLOURS = 6
HEIGHT = 250.0

router = pages(Scope.JOBS_READ)


@router.get("/ui/jobs/{job_id}/samples/{unit}/{row}")
async def sample_page(
    request: Request,
    store: StoreOf,
    settings: SettingsOf,
    asks: CallerOf,
    budget: BudgetOf,
    job: JobOf,
    unit: Annotated[int, PathPart(ge=0, lt=MAX_UNITS)],
    row: Annotated[int, PathPart(ge=0, le=2**31)],
) -> Response:
    """Show a row of a committed unit, counted over the unit's shards."""
    async with budget.turn(asks.owner, Turn.LARGE_BODY):
        context = await run_in_threadpool(sample_context, store, settings, job, unit, row)
    return await run_in_threadpool(page, request, "sample.html", **context)


def sample_context(store: Store, settings: Settings, job: JobRow, unit: int, row: int) -> dict[str, Any]:
    """Return what the page of a sample shows. Raises NotFound, DatasetBroken, ServiceBusy."""
    found = store.read(commits.readable_unit, job.id, unit)
    shard, in_shard = _place(found, row)
    if found is None or shard is None or job.identity is None:
        raise NotFound(f"job {job.id} has no row {row} in unit {unit} that can be read", field="row")
    rows = sum(one.rows for one in found.shards)
    context = {"job": job, "unit": unit, "row": row, "rows": rows, "shard": shard, "found": found}
    if not found.in_folder:
        return context | {"shown": None, "chart": None}
    file = _file(settings, job.id, found, shard)
    arguments = file, in_shard, job.model, settings.model_roots, job.identity
    try:
        shown = apart.call(
            shown_row, *arguments, memory_bytes=settings.plan_memory_bytes, deadline_s=DEADLINE_S
        )
    except apart.Ended as ended:
        detail = f"the process that read the row {ended}"
        if ended.is_passing:
            raise ServiceBusy(detail, cure="load the page again") from ended
        raise DatasetBroken(detail, cure="run `quarry verify` on the dataset") from ended
    return context | {"shown": shown, "chart": _chart(shown)}


def _place(unit: UnitView | None, row: int) -> tuple[ShardEntry | None, int]:
    """Return the shard that holds a unit's row, and which of its rows that is."""
    for shard in unit.shards if unit is not None else ():
        if row < shard.rows:
            return shard, row
        row -= shard.rows
    return None, row


def _file(settings: Settings, job_id: str, unit: UnitView, shard: ShardEntry) -> Path:
    """Return where a shard is: in the dataset, or in its attempt's folder until it lands there."""
    attempt = AttemptId(job_id=job_id, unit=unit.unit, epoch=unit.epoch)
    landed = settings.dataset_dir(job_id) / shard.path
    sealed = sealed_files(settings, UnitFiles(attempt, unit.shards, unit.index))[shard.path]
    return sealed if sealed.is_file() else landed


def _chart(shown: ShownRow) -> Chart:
    """Return a line a layer over the tokens of the row."""
    values = [value for layer in shown.rms.values() for value in layer]
    x = Axis(0, max(1, shown.num_tokens - 1), 44, WIDTH - 8, whole=True)
    chart = Chart(HEIGHT, x, spanning(values, HEIGHT - 48, TOP, log=True))
    rows = []
    for index, (layer_id, layer) in enumerate(shown.rms.items()):
        points = [(x.at(place * shown.step), chart.y.at(value)) for place, value in enumerate(layer)]
        chart.path(points, f"line s{index % COLOURS}")
        rows.append((f"layer {layer_id}", number(median(layer)), number(min(layer)), number(max(layer))))
    chart.rows = rows
    return chart
