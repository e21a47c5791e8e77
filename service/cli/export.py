"""`quarry export`: a finished dataset in the format of a drafter's trainer."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import naming, say
from service.cli.datasets import DatasetArgument, JobsOption, Revision, check_writable
from service.export.options import Algorithm, ExportOptions, FormatName, chosen_algorithm, parsed_layers
from service.visible import visible


def export(
    dataset: DatasetArgument,
    to: Annotated[FormatName, typer.Option("--to", help="The trainer that reads it.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder to write.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Auxiliary layers by vLLM's ids, such as 2,16,29; all if left out."),
    ] = None,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Kind of drafter; the trainer's usual one if left out.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option("--draft-vocab", metavar="N", help="Size of the drafter's vocabulary.")
    ] = None,
    job: JobsOption = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the target, if it is not below QUARRY_MODEL_ROOTS."),
    ] = None,
    revision: Revision = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Length of every row, for nemo.")
    ] = None,
) -> None:
    """Write a dataset in a trainer's format; run it again to continue where it stopped."""
    options = ExportOptions(
        to=to,
        algorithm=chosen_algorithm(to, algorithm),
        layers=parsed_layers(layers),
        draft_vocab=draft_vocab,
        jobs=tuple(job or ()),
        target=target,
        revision=revision,
        max_tokens=max_tokens,
    )
    nearest = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    check_writable(nearest, nearest, "out", "name a folder that can be written")
    from service.export.run import export as write

    with naming(out):
        done = write(dataset, out, options)
    left_out = done.rows_in_dataset - done.rows
    print(visible(done.notes))
    say(f"{out}: {done.rows} rows" + (f", {left_out} left out" if left_out else ""))
