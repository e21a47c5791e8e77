"""`quarry train`: a trainer's own command on a dataset, whose states it reads in place."""

from typing import Annotated

import typer

from service.cli.console import group
from service.cli.datasets import DatasetArgument, JobsOption, Revision

app = group("train", "Train on a finished dataset with a trainer's own command, without copying the states.")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
)
def speculators(
    context: typer.Context,
    dataset: DatasetArgument,
    job: JobsOption = None,
    revision: Revision = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Hold every index and every layer that is read against its checksum, as every export does.",
        ),
    ] = False,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Train on the rows of this job, http://HOST:PORT/jobs/ID, as they are captured; DATASET "
            "gives the validation rows and the draft vocabulary.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --live, of a job with 'retention: consumed': the consumer that acknowledges the rows "
            "of each checkpoint.",
        ),
    ] = None,
) -> None:
    """Run 'speculators train' on DATASET; all arguments after it are passed to that command unchanged.

    On several GPUs: torchrun --nproc-per-node N --no-python quarry train speculators DATASET ...
    """
    from service.trainers.speculators import train

    train(dataset, context.args, job or (), revision, live, consumer, check=check)
