"""`quarry serve` and `quarry worker`: the processes that stay."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import load_settings, log_to_stderr
from service.installed import check_engine, check_python
from service.settings import Settings

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the database, plans and datasets. [env: QUARRY_DATA_DIR]")
]

PRIVATE_UMASK = 0o077
"""The database and the datasets of a service are its own user's; a child has its parent's umask."""


def serve(
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [env: QUARRY_HOST]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [env: QUARRY_PORT]")] = None,
    with_worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Run a worker beside the API.")
    ] = True,
) -> None:
    """Serve the HTTP API and run jobs, until SIGTERM or SIGINT."""
    check_python()
    from service.api.serve import serve as serve_until_signalled

    os.umask(PRIVATE_UMASK)
    log_to_stderr()
    settings = load_settings(data_dir=data_dir, host=host, port=port)
    if with_worker:
        check_engine(settings)
    raise typer.Exit(serve_until_signalled(settings, with_worker=with_worker))


def worker(
    data_dir: DataDir = None,
    only_job: Annotated[str | None, typer.Option(help="Run this job, then end.")] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no job is queued, running or publishing.")
    ] = False,
    parent_pid: Annotated[int | None, typer.Option(hidden=True, help="End when this process does.")] = None,
) -> None:
    """Run jobs, until SIGTERM or SIGINT; then finish what the engine holds and release the rest."""
    log_to_stderr()
    if parent_pid is None:
        os.umask(PRIVATE_UMASK)
        check_python()
        settings = load_settings(data_dir=data_dir)
        check_engine(settings)
    else:
        from service.lifeline import die_with_parent

        die_with_parent(parent_pid)
        settings = Settings.model_validate_json(sys.stdin.buffer.read())
    from service.worker import run_worker

    raise typer.Exit(run_worker(settings, only_job=only_job, until_idle=until_idle))
