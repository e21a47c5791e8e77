"""`quarry doctor`: checks this node before anybody pays for GPU hours."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import EXIT_BROKEN, AsJson, say
from service.cli.datasets import hub_target
from service.cli.processes import DataDir
from service.doctor.check_result import Verdict
from service.settings import load_settings


def doctor(
    data_dir: DataDir = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR_OR_ID", help="A model that this node will capture.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(metavar="NAMESPACE/NAME", help="A repository that it will push to.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this node: each line is good, doubtful, bad or not seen, and says what to do.

    Uses the settings that 'quarry serve' would use. Starts nothing, and only reads the database. Exits with 1
    if something is bad.
    """
    from service.doctor.examination import examine

    settings = load_settings(data_dir=data_dir)
    if model is not None and Path(model).is_dir():  # the caller may read it
        model = str(Path(model).resolve())
        roots = (Path(model).parent, *settings.model_roots)
        settings = settings.model_copy(update={"model_roots": roots})
    target = None if repo is None else hub_target(repo, public=True, config_name="default")
    is_bad = False
    for result in examine(settings, model, target):
        is_bad |= result.verdict is Verdict.BAD
        if as_json:
            say(json.dumps(asdict(result)))
            continue
        say(f"{result.verdict:<10}{result.what:<15}{result.detail}")
        if result.cure is not None:
            say(f"{'':<25}-> {result.cure}")
    if is_bad:
        raise typer.Exit(EXIT_BROKEN)
