"""`quarry diagnose`: explains a drafter's acceptance length."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import AsOneJson, naming, say
from service.cli.datasets import ReportOption


def diagnose(
    drafter: Annotated[
        Path, typer.Argument(metavar="DRAFTER", exists=True, file_okay=False, help="The drafter's folder.")
    ],
    dataset: Annotated[
        str,
        typer.Option(
            metavar="DATASET", help="Its target's dataset: a folder, or hf://datasets/NAMESPACE/NAME."
        ),
    ],
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=2, help="Rows to measure.")] = 200,
    target: Annotated[
        str | None, typer.Option(metavar="DIR", help="The target, if it is not below QUARRY_MODEL_ROOTS.")
    ] = None,
    page: ReportOption = None,
    as_json: AsOneJson = False,
) -> None:
    """Measure a drafter's acceptance length and, if it was trained on wrong inputs, name them."""
    from service.diagnose.diagnosis import diagnose as measure
    from service.diagnose.verdict import findings, lines

    with naming(drafter):
        diagnosis, source, model = measure(drafter, dataset, target, rows)
    if as_json:
        found = [dataclasses.asdict(one) for one in findings(diagnosis)]
        print(json.dumps(dataclasses.asdict(diagnosis) | {"findings": found}, allow_nan=False))
    else:
        for line in lines(diagnosis):
            say(line)
    if page is not None:
        from service.report.diagnosis import write_page

        with naming(page):
            write_page(page, diagnosis, source, model.folder)
        say(f"the page is {page}", file=sys.stderr)
