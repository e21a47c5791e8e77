"""`quarry serve` and `quarry worker`: the long-running processes."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from schemas.worker import Role
from service.cli.console import complain
from service.errors import OptionRefused
from service.installed import check_engine, check_python
from service.logs import log_to_stderr
from service.settings import Settings, load_settings
from service.work.placement import Placement, placements


def _setting(name: str, said: str) -> str:
    """Return the help of an option that is also a setting and has the setting's default."""
    return f"{said} [env: QUARRY_{name.upper()}; default: {Settings.model_fields[name].default}]"


DataDir = Annotated[
    Path | None, typer.Option(help=_setting("data_dir", "Folder of the database, plans and datasets."))
]

Workers = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Number of workers, each with its share of the GPUs and cores; auto: one for each group of "
        "QUARRY_TENSOR_PARALLEL_SIZE GPUs.",
    ),
]

PRIVATE_UMASK = 0o077
"""Only the service's user may read its database and datasets; children inherit the umask."""


def serve(
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help=_setting("host", "Address to listen on."))] = None,
    port: Annotated[
        int | None, typer.Option(help=_setting("port", "Port to listen on; 0 takes a free one."))
    ] = None,
    with_worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Run workers alongside the API.")
    ] = True,
    workers: Workers = "1",
) -> None:
    """Serve the HTTP API and run jobs until SIGTERM or SIGINT."""
    check_python()
    from service.api.serve import EXIT_NOT_STARTED, bound, serve as serve_until_signalled

    os.umask(PRIVATE_UMASK)
    settings = load_settings(data_dir=data_dir, host=host, port=port)
    log_to_stderr(settings.log_format)
    placed: list[Placement] = []
    if with_worker:
        _check_engine(settings)
        placed = placements(workers, settings.tensor_parallel_size)
    try:
        listener = bound(settings)
    except OptionRefused as error:
        complain(error.problem())
        raise typer.Exit(EXIT_NOT_STARTED) from error
    with closing(listener):
        raise typer.Exit(serve_until_signalled(settings, listener, placed))


def worker(
    data_dir: DataDir = None,
    only_job: Annotated[str | None, typer.Option(help="Run this job, then exit.")] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Exit when no job is queued, running or publishing.")
    ] = False,
    workers: Workers = "1",
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,...",
            help="What the worker does: plan, capture, store, finish. 'capture,store' needs no data folder: "
            "QUARRY_DATA_DIR is then scratch space. [env: QUARRY_ROLES; default: all]",
        ),
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True, help="Exit when this process does.")] = None,
) -> None:
    """Run jobs until SIGTERM or SIGINT; then finish what the engine holds and release the rest."""
    os.umask(PRIVATE_UMASK)  # also under a parent of Ray's
    if parent_pid is None:
        check_python()
        settings = load_settings(data_dir=data_dir, roles=roles and tuple(roles.split(",")))
        log_to_stderr(settings.log_format)
        _check_engine(settings)
        from service.host import check_data_dir

        check_data_dir(settings)
        if len(placed := placements(workers, settings.tensor_parallel_size)) > 1:
            raise typer.Exit(_supervise(settings, placed, only_job, until_idle=until_idle))
    else:
        from service.lifeline import ORPHANED, die_with_parent

        die_with_parent(parent_pid, ORPHANED)
        settings = Settings.model_validate_json(sys.stdin.buffer.read())
        log_to_stderr(settings.log_format)
    from service.worker import run_worker

    raise typer.Exit(run_worker(settings, only_job=only_job, until_idle=until_idle))


def _check_engine(settings: Settings) -> None:
    """Check the engine where workers capture: elsewhere none need be installed. Raises OptionRefused."""
    if Role.CAPTURE in settings.roles:
        check_engine(settings)


def _supervise(settings: Settings, placed: list[Placement], only_job: str | None, *, until_idle: bool) -> int:
    """Run several workers until a signal, or until all have done their work; return the exit code."""
    from service.work.supervisor import EXIT_WORKER_LOST, WORK_DONE_CODES, NodeSupervisor

    arguments = [*(["--only-job", only_job] if only_job else []), *(["--until-idle"] if until_idle else [])]
    node = NodeSupervisor(
        settings, placed, *arguments, last_codes=WORK_DONE_CODES if arguments else frozenset()
    )
    told: list[int] = []

    def end(number: int, _: object) -> None:
        told.append(number)
        node.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    node.start()
    node.join()
    cut_short_by = told[0] if told and until_idle else None
    return EXIT_WORKER_LOST if node.gave_up else node_code(node.codes, cut_short_by)


def node_code(codes: Sequence[int], told: int | None) -> int:
    """Return the exit code of a node from those of its workers; a negative one names a signal.

    What one could not do, another may have done. `told` is the signal that ended the node before all was
    done. Workers get SIGTERM, whatever it was: one that works says so, or is killed if it takes too long; one
    that still starts had nothing.
    """
    if told is not None and not {128 + signal.SIGTERM, -signal.SIGKILL}.isdisjoint(codes):
        return 128 + told
    return min((code for code in codes if code >= 0), default=0 if told is None else 128 + told)
