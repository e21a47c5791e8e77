"""The page of a sample: its tokens coloured by loss mask, and the magnitude of its states at each layer."""

import json
from contextlib import closing
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
from service.api.routes.resources import BudgetOf, CallerOf, JobOf, SettingsOf, StoreOf
from service.capture.attempt_files import sealed_files
from service.control.budget import Turn
from service.errors import DatasetBroken, NotFound, ServiceBusy
from service.page.answers import page
from service.page.session import pages
from service.plan.child.fork_server import FORK_SERVER
from service.plan.child.task import Limits, RowTask, ShownRow
from service.report.chart import TOP, WIDTH, Axis, Chart, spanning
from service.report.wording import number
from service.settings import Settings
from service.store import JobRow, Store, UnitFiles, commits

CPU_S, DEADLINE_S, MAX_ANSWER_BYTES = 10.0, 30.0, 2**20
COLOURS = 6
HEIGHT = 220.0

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
    async with budget.turn(asks.owner, Turn.SAMPLE):
        context = await run_in_threadpool(sample_context, store, settings, job, unit, row)
    return await run_in_threadpool(page, request, "sample.html", **context)


def sample_context(store: Store, settings: Settings, job: JobRow, unit: int, row: int) -> dict[str, Any]:
    """Return the context of a sample's page. Raises NotFound, DatasetBroken, ServiceBusy."""
    found = store.read(commits.readable_unit, job.id, unit)
    shard, in_shard = _place(found, row)
    if found is None or shard is None or job.identity is None:
        raise NotFound(f"job {job.id} has no row {row} in unit {unit} that can be read", field="row")
    rows = sum(one.rows for one in found.shards)
    context = {"job": job, "unit": unit, "row": row, "rows": rows, "shard": shard, "found": found}
    if not found.in_folder:
        return context | {"shown": None, "chart": None}
    file = _file(settings, job.id, found, shard)
    shown = _shown(RowTask(file, in_shard, job.model, settings.model_roots, job.identity), settings)
    return context | {"shown": shown, "chart": sizes(shown)}


def _shown(task: RowTask, settings: Settings) -> ShownRow:
    """Read a row in a child process. Raises DatasetBroken, ServiceBusy."""
    cure = "run `quarry verify` on the dataset, which says more"
    try:
        talk, life, _ = FORK_SERVER.start_child()
    except OSError as error:
        raise ServiceBusy(f"no process reads the row: {error.strerror}", cure="load it again") from error
    with closing(life), closing(talk):
        try:
            talk.send((task, Limits(settings.plan_memory_bytes, CPU_S, DEADLINE_S)))
            if not talk.poll(DEADLINE_S):
                raise DatasetBroken(f"the row took more than {DEADLINE_S:g} s to read", cure=cure)
            kind, answer = json.loads(talk.recv_bytes(MAX_ANSWER_BYTES))
            if kind == "row":
                return ShownRow.model_validate(answer)
        except (EOFError, OSError, ValueError) as error:
            raise DatasetBroken("the process that read the row ended", cure=cure) from error
    raise DatasetBroken(f"the row cannot be read: {answer}", cure=cure)


def _place(unit: UnitView | None, row: int) -> tuple[ShardEntry | None, int]:
    """Return the shard that holds a unit's row, and the row's number in it."""
    for shard in unit.shards if unit is not None else ():
        if row < shard.rows:
            return shard, row
        row -= shard.rows
    return None, row


def _file(settings: Settings, job_id: str, unit: UnitView, shard: ShardEntry) -> Path:
    """Return the path of a shard: in the dataset, or in its attempt's folder until it has landed."""
    attempt = AttemptId(job_id=job_id, unit=unit.unit, epoch=unit.epoch)
    landed = settings.dataset_dir(job_id) / shard.path
    sealed = sealed_files(settings, UnitFiles(attempt, unit.shards, unit.index))[shard.path]
    return sealed if sealed.is_file() else landed


def sizes(shown: ShownRow) -> Chart:
    """Return a chart with one line per layer over the tokens of the row, of a single token with a dot."""
    values = [value for layer in shown.rms.values() for value in layer]
    x = Axis(0, max(1, shown.num_tokens - 1), 44, WIDTH - 8, whole=True)
    chart = Chart(HEIGHT, x, spanning(values, HEIGHT - 36, TOP, log=True))
    rows = []
    for index, (layer_id, layer) in enumerate(shown.rms.items()):
        places = {place * shown.step: value for place, value in enumerate(layer)}
        chart.line(places, f"s{index % COLOURS}", dots=len(layer) == 1)
        rows.append((f"layer {layer_id}", number(median(layer)), number(min(layer)), number(max(layer))))
    chart.rows = rows
    return chart
