"""`export.json`: records what is exported, so that an export can resume where it stopped and two never mix.

Only one export at a time may write to a folder: two would rename each other's unfinished files.
"""

import json
from pathlib import Path
from typing import Any

from schemas.dataset.seal import seal_bytes
from service.errors import IdentityChanged, OptionRefused
from service.export.saving import seal_json
from service.export.source import Source

LOCK = ".export.lock"
RECORD = "export.json"
NOTES = "TRAIN.md"
RECORD_VERSION = 1
_OPTION_OF = {"format": "to", "algorithm": "algorithm", "layers": "layers", "draft_vocab": "draft-vocab"}
_OPTION_OF |= {"jobs": "job", "max_tokens": "max-tokens", "target": "target"}


def export_identity(source: Source, trainer_layers: list[int]) -> dict[str, Any]:
    """Return everything that determines the export's bytes: the dataset's manifests and the options."""
    options, identity = source.options, source.identity
    return {
        "record_version": RECORD_VERSION,
        "format": str(options.to),
        "algorithm": str(options.algorithm),
        "layers": list(source.layers),
        "trainer_layers": trainer_layers,
        "draft_vocab": options.draft_vocab,
        "max_tokens": options.max_tokens,
        "target": options.target,
        "jobs": {job: manifest.sha256 for job, manifest in source.rows.manifests.items()},
        **identity.model_dump(include={"model", "revision", "dtype", "hidden_size", "num_layers"}),
        "rows_in_dataset": len(source.rows),
    }


def begin(out: Path, identity: dict[str, Any]) -> bool:
    """Record the export in `out` before its first file, or check that it is the one already begun there.

    Returns whether it was ended already. Raises OptionRefused (`out`), IdentityChanged naming the field.
    """
    path = out / RECORD
    if not path.exists():
        if any(entry.name != LOCK and not entry.name.endswith(".tmp") for entry in out.iterdir()):
            raise OptionRefused(
                f"{out} holds files and no {RECORD}", field="out", cure="name an empty folder or a new one"
            )
        seal_json(path, identity | {"complete": False})
        return False
    try:
        recorded = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        cure = "name an empty folder or a new one"
        raise OptionRefused(f"{path} is no record of an export: {error}", field="out", cure=cure) from error
    for name, value in identity.items():
        if recorded.get(name) != value:
            cure = f"give the same --{_OPTION_OF[name]}" if name in _OPTION_OF else "export the same dataset"
            raise IdentityChanged(
                f"{out} was begun with {name} {json.dumps(recorded.get(name))}, not {json.dumps(value)}",
                field=name,
                cure=f"{cure} to go on, or name another folder in --out",
            )
    if recorded["complete"] and (out / NOTES).exists():
        return True
    # Without what is promised beside `identity`, such as that all was checked: it is not of what comes now.
    seal_json(path, identity | {"complete": False})
    return False


def end(out: Path, identity: dict[str, Any], rows: int, notes: str) -> None:
    """Record that every file is written."""
    record = identity | {"complete": True, "rows": rows}
    seal_bytes(out / NOTES, notes.encode())
    seal_json(out / RECORD, record)
