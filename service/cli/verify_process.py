"""The process in which `quarry verify` reads a dataset: some crafted files make pyarrow crash.

Such a file counts as broken, as does one that takes forever, and another process reads the rest.
"""

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from schemas.dataset.seal import seal_bytes
from schemas.names import REPO_ID_PATTERN
from service.apart import limit_memory, received, start
from service.cli.console import EXIT_BROKEN, EXIT_NOT_COMPLETE, naming
from service.errors import DatasetBroken, OptionRefused, QuarryError
from service.lifeline import FAULTS
from service.settings import Settings

MOST_ENDED = 10
"""Files that may crash the process: each time, everything readable is read again."""
_EXIT_CODES = {"right": 0, "BROKEN": EXIT_BROKEN} | dict.fromkeys(
    ("not read whole", "not complete yet"), EXIT_NOT_COMPLETE
)


@dataclass(frozen=True, slots=True)
class VerifyOrder:
    """What to verify: a folder, or else a repository of that name; and what to output."""

    dataset: str
    settings: Settings
    model_folder: Path | None
    as_json: bool
    page: Path | None


def verify_apart(order: VerifyOrder, tell: Callable[[str], None]) -> int:
    """Verify a dataset; pass the report to `tell` before the page is written; return the exit code for it.

    Raises:
        DatasetBroken: more than `MOST_ENDED` files crashed or hung the process that read them.
        NotFound, EngineRefused, OptionRefused, HubUnavailable, DiskFull, OSError: as `verify_dataset`.
    """
    broken: dict[str, str] = {}
    silence_s = order.settings.plan_silence_s
    while len(broken) <= MOST_ENDED:
        child, ours = start(_serve, order, broken)
        path: str | None = None
        verdict_code: int | None = None
        try:
            while path is None or ours.poll(silence_s):
                said = received(ours)
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, tuple):
                    text, verdict_code = said
                    tell(text)
                    said = None
                path = said
            child.kill()
            child.join()
            broken[path] = f"was read for {silence_s:g} s without its next block or row"
            continue
        except EOFError:
            child.join()
        code = child.exitcode or 0
        if verdict_code is not None and code == 0:
            return verdict_code
        if path is None or -code not in FAULTS:
            raise QuarryError(f"the process that reads {path or order.dataset} ended with exit code {code}")
        broken[path] = f"ended the process that read it ({signal.Signals(-code).name})"
    raise DatasetBroken(f"{len(broken)} files ended the process that read them: {', '.join(broken)}")


def repository_named(dataset: str) -> str:
    """Return NAMESPACE/NAME, before which there may be `hf://datasets/`. Raises OptionRefused."""
    from service.artifacts.dataset_files import repository_of

    repo_id = repository_of(dataset)
    if re.fullmatch(REPO_ID_PATTERN, repo_id) is None:
        cure = "name the folder of a dataset, or NAMESPACE/NAME of a repository"
        raise OptionRefused(f"there is no folder {dataset}", field="PATH_OR_REPO", cure=cure)
    return repo_id


def _serve(parent: Connection, order: VerifyOrder, broken: Mapping[str, str]) -> None:
    """Verify in the child. Sends the notes of a `Reading`, then the report, and any error."""
    from service.artifacts.dataset_files import HubFiles
    from service.proof.tally import DatasetTally
    from service.proof.verify import Reading, verify_dataset

    limit_memory(order.settings.read_memory_bytes)
    tally, folder = DatasetTally(), Path(order.dataset)
    model, reading = order.model_folder, Reading(parent.send, broken)
    try:
        with naming(folder):
            endpoint, token = order.settings.hub_endpoint, order.settings.token()
            repo_id = None if folder.is_dir() else repository_named(order.dataset)
            hub_files = HubFiles(repo_id, endpoint=endpoint, token=token) if repo_id else None
            files = hub_files or folder
            report = verify_dataset(files, model_folder=model, tally=tally, reading=reading)
        text = report.model_dump_json(ensure_ascii=True) if order.as_json else str(report)
        parent.send((text, _EXIT_CODES[report.verdict]))
        if order.page is not None:
            from service.report.page import render_page

            text = render_page(report, tally, model, datetime.now(UTC))
            with naming(order.page):
                seal_bytes(order.page, text.encode())
    except (QuarryError, OSError) as error:
        parent.send(error)
