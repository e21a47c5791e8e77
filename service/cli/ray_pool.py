"""`quarry ray`: workers on a Ray cluster."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import EXIT_NOT_COMPLETE, AsJson, group, say
from service.cli.processes import DataDir
from service.logs import log_to_stderr
from service.settings import Settings, load_settings

if TYPE_CHECKING:
    from service.ray_pool import PoolWorker, RayPool

app = group("ray", "Run workers on a Ray cluster's nodes with one PostgreSQL, for jobs that are pushed.")

Scratch = Annotated[
    Path | None,
    typer.Option(help="Folder on each node that its workers capture into.  [default: /var/tmp/quarry]"),
]
Address = Annotated[str, typer.Option(help="The cluster's address; 'auto' finds one on this node.")]


@contextmanager
def _pool(settings: Settings, address: str, scratch: Path | None = None) -> Iterator["RayPool"]:
    from service.ray_pool import SCRATCH, ray_pool

    log_to_stderr(settings.log_format)
    # Ray prints messages about its nodes to stdout, between our own lines.
    with redirect_stdout(sys.stderr), ray_pool(settings, address, scratch or SCRATCH) as pool:
        yield pool


@app.command()
def up(
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Number of workers in the pool.")],
    gpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="GPUs of one node that each worker's model is split over; 0 for vLLM's CPU build. "
            "[env: QUARRY_TENSOR_PARALLEL_SIZE]",
        ),
    ] = None,
    address: Address = "auto",
    data_dir: DataDir = None,
    scratch: Scratch = None,
) -> None:
    """Start or change the pool; surplus workers, and those with other settings, are drained."""
    settings = load_settings(data_dir=data_dir, tensor_parallel_size=gpus_per_worker or None)
    gpus = settings.tensor_parallel_size if gpus_per_worker is None else gpus_per_worker
    with _pool(settings, address, scratch) as pool:
        pool.scale(workers, gpus)
        started = pool.status()
    _print(started)


@app.command()
def status(
    address: Address = "auto",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the pool's workers. The exit code is 3 unless all are running."""
    with _pool(load_settings(data_dir=data_dir), address) as pool:
        workers = pool.status()
    _print(workers, as_json)
    if not workers or any(worker.state != "running" for worker in workers):
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def down(address: Address = "auto", data_dir: DataDir = None) -> None:
    """Drain all workers and end the pool; jobs wait for the next pool."""
    with _pool(load_settings(data_dir=data_dir), address) as pool:
        pool.scale(0, 0)


def _print(workers: Sequence["PoolWorker"], as_json: bool = False) -> None:
    for worker in workers:
        say(*((json.dumps(worker._asdict()),) if as_json else worker))
