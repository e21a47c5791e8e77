"""`quarry train`: a trainer's own command, on a dataset whose states it reads where they are."""

from typing import Annotated

import typer

from service.cli.console import group
from service.cli.datasets import DatasetArgument, JobsOption, Revision

app = group(
    "train", "Train on a finished dataset by a trainer's own command, without a second copy of the states."
)


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
    live: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Train on the rows of this job, http://HOST:PORT/jobs/ID, as they are captured; DATASET "
            "validates, and gives the draft vocabulary.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --live: what a checkpoint has had may go from a job with 'retention: consumed'.",
        ),
    ] = None,
) -> None:
    """Run 'speculators train' on DATASET; all that comes after it goes to that command unchanged.

    On several GPUs: torchrun --nproc-per-node N --no-python quarry train speculators DATASET ...
    """
    from service.trainers.speculators import train

    train(dataset, context.args, job or (), revision, live, consumer)
