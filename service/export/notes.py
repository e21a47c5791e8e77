"""`TRAIN.md`: the trainer's exact command, and what to know before running it. Each format has a template."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from service.export.format import Format
from service.visible import one_line

_TEMPLATES = Path(__file__).parent / "templates"


def notes_of(trainer_format: Format, out: Path) -> str:
    """Return the notes, in Markdown, for an export to the folder `out`."""
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - Markdown is written; `shell` quotes what a dataset or its path names
        keep_trailing_newline=True,
    )
    templates.filters["shell"] = _shell_word
    source = trainer_format.source
    return templates.get_template(f"{source.options.to}.md.jinja").render(
        format=trainer_format,
        source=source,
        options=source.options,
        out=out.absolute(),
        longest=max(source.rows.num_tokens),
    )


def _shell_word(value: str | Path) -> str:
    """Return a value quoted as one word of a shell command, on one line."""
    return one_line(shlex.quote(str(value)))
