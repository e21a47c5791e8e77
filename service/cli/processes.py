"""`quarry serve` and `quarry worker`: the processes that stay."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import load_settings, log_to_stderr

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the database, plans and datasets. [env: QUARRY_DATA_DIR]")
]


def serve(
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [env: QUARRY_HOST]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [env: QUARRY_PORT]")] = None,
    with_worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Run a worker beside the API.")
    ] = True,
) -> None:
    """Serve the HTTP API and run jobs, until SIGTERM or SIGINT."""
    from service.api.serve import serve as serve_until_signalled

    log_to_stderr()
    settings = load_settings(data_dir=data_dir, host=host, port=port)
    raise typer.Exit(serve_until_signalled(settings, with_worker=with_worker))


def worker(
    data_dir: DataDir = None,
    only_job: Annotated[str | None, typer.Option(help="Run this job, then end.")] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True, help="End when this process does.")] = None,
) -> None:
    """Run jobs, until SIGTERM or SIGINT; then end what the engine holds and give the rest back."""
    if parent_pid is not None:
        from service.lifeline import die_with_parent

        die_with_parent(parent_pid)
    log_to_stderr()
    settings = load_settings(data_dir=data_dir)
    from service.worker import run_worker

    raise typer.Exit(run_worker(settings, only_job=only_job))
