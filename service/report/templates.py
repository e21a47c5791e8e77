"""The templates of pages, with autoescaping and filters that format numbers for people."""

import base64
import hashlib
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.filesize import decimal

from service.report.wording import count, number, percent, rms_text, short

_HERE = Path(__file__).parent
REPORT_CSS = (_HERE / "page.css").read_text(encoding="utf-8")


def templates(*folders: Path) -> Environment:
    """Return an environment with the templates of `folders`, then those of reports."""
    environment = Environment(
        loader=FileSystemLoader([*folders, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digest = base64.b64encode(hashlib.sha256(REPORT_CSS.encode()).digest()).decode()
    environment.globals |= {"css": REPORT_CSS, "css_hash": f"sha256-{digest}"}
    environment.globals["version"] = version("eagle-quarry")
    environment.filters |= {"count": count, "number": number, "percent": percent, "rms": rms_text}
    environment.filters |= {"short": short, "size": decimal, "px": "{:.1f}".format}
    return environment
