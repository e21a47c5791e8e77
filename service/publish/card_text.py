"""The text of the dataset card: renders `card.md.jinja`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from schemas.dataset.jobs_table import JobEntry
from schemas.names import is_local_model

INDEX_CONFIG = "index"
SHOWN_JOBS = 30
"""Maximum rows in the tables of jobs: a repository that gets a job every night holds hundreds."""
_MARKUP = re.compile(r"[^\w ./+,:=@-]")
STORAGE = {"none": "none", "planes": "planes (lossless)", "fp8": "fp8 (lossy: within 1/17 of each value)"}


def card_text(groups: Mapping[str, Sequence[JobEntry]]) -> str:
    """Return the card's body; `groups` has the jobs of each states configuration, at least one each."""
    every = [job for group in groups.values() for job in group]
    groups = {name: groups[name] for name in sorted(groups)}
    return _template().render(
        groups=groups,
        every=every,
        newest={name: _newest(group) for name, group in groups.items()},
        rejects={name: _rejects(group) for name, group in groups.items()},
        index_config=INDEX_CONFIG,
        storage=STORAGE,
    )


@cache
def _template() -> Template:
    """Return the card's template: compiling it takes longer than rendering it."""
    environment = Environment(  # noqa: S701 - the output is Markdown; `cell` escapes table cells
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined
    )
    environment.filters.update(
        # A request's own words may hold HTML, or the mark of our part's end.
        cell=lambda text: str(text).replace("|", "\\|").replace("<", "&lt;"),
        count="{:,}".format,
        known=lambda number: "-" if number is None else number,
        linked=_linked,
        plain=_plain,
        draft_sizes=_draft_sizes,
    )
    return environment.get_template("card.md.jinja")


def _newest(group: Sequence[JobEntry]) -> list[JobEntry]:
    return sorted(group, key=lambda job: job.captured_at, reverse=True)[:SHOWN_JOBS]


def _rejects(group: Sequence[JobEntry]) -> list[tuple[str, int]]:
    """Return how many samples were rejected for each reason, sorted by reason."""
    return sorted(sum((Counter(job.rejects) for job in group), Counter()).items())


def _plain(model: str) -> str:
    """Return a name as text: a folder's may hold Markdown, HTML, line breaks or the end of our part."""
    return _MARKUP.sub(lambda odd: f"&#{ord(odd[0])};", model)


def _linked(model: str) -> str:
    text = _plain(model)
    if is_local_model(model):
        return f"`{model}`" if text == model else text  # within code, `&#60;` would be shown as it is
    return f"[{text}](https://huggingface.co/{text})"


def _draft_sizes(job: JobEntry) -> dict[int, str]:
    """Return the share of supervised tokens that a drafter could draft, by its vocabulary size."""
    supervised = job.totals.supervised_tokens
    return {part.draft_vocab: f"{part.tokens / supervised:.3%}" for part in job.vocabulary.coverage}
