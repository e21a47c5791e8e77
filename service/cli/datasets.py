"""`quarry verify` and `quarry publish`: commands on a finished dataset."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from schemas.request import HubTarget
from service.cli.console import AsOneJson, naming, say
from service.cli.verify_process import VerifyOrder, verify_apart
from service.errors import OptionRefused
from service.settings import load_settings

DatasetArgument = Annotated[
    str, typer.Argument(metavar="DATASET", help="A folder, or hf://datasets/NAMESPACE/NAME.")
]
JobsOption = Annotated[
    list[str] | None, typer.Option("--job", metavar="ID", help="A job of the dataset; all if left out.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a dataset repository.")]


def _writable(page: Path | None) -> Path | None:
    if page is not None:
        cure = "name a file in a folder that exists and can be written"
        check_writable(page, page.absolute().parent, "report", cure)
    return page


ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", dir_okay=False, callback=_writable, help="Write an HTML page with charts."
    ),
]


def verify(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_REPO",
            help="A folder, or hf://datasets/NAMESPACE/NAME or just NAMESPACE/NAME on the Hub, which is "
            "downloaded unit by unit into $TMPDIR.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of the target, for the logit check."),
    ] = None,
    as_json: AsOneJson = False,
    page: ReportOption = None,
) -> None:
    """Run every check on a finished dataset."""
    settings = load_settings()
    code = verify_apart(VerifyOrder(dataset, settings, model, as_json, page), print)
    if page is not None:
        say(f"the page is {page}", file=sys.stderr)
    if code:
        raise typer.Exit(code)


def publish(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False)],
    repo_id: Annotated[str, typer.Argument(help="namespace/name of the dataset repository.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    config_name: Annotated[str, typer.Option(help="Name of the dataset's configuration.")] = "default",
) -> None:
    """Push a finished dataset to the Hub; files already there are not sent again."""
    from service.publish.publisher import publish_folder
    from service.publish.push import check_target

    settings = load_settings()
    hub = hub_target(repo_id, public=public, config_name=config_name)
    check_target(hub, settings)
    with naming(folder):
        commit = publish_folder(folder, hub, settings)
    say(f"{repo_id}: commit {commit}")


def hub_target(repo_id: str, *, public: bool, config_name: str) -> HubTarget:
    """Return the checked target. Raises OptionRefused."""
    try:
        return HubTarget(repo_id=repo_id, private=not public, config_name=config_name)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise OptionRefused(first["msg"], field=str(first["loc"][0]), cure="give 'namespace/name'") from error


def check_writable(what: Path, folder: Path, field: str, cure: str) -> None:
    """Refuse an output that cannot be written to `folder`, before hours of reading. Raises OptionRefused."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionRefused(f"{what} cannot be written", field=field, cure=cure)
