"""A job file on this machine -> a checked request, and the folders that its user may read."""

import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import yaml

from schemas.request import ExtractRequest, Part
from schemas.source import FileSource, MixSource
from service.control.request_body import parse_body, parse_json
from service.errors import OptionRefused, RequestError
from service.repeated_fields import ONE_OF_THEM, clipped
from service.settings import Settings

MAX_FILE_BYTES = 1 << 30
_MERGE = "tag:yaml.org,2002:merge"


def read_job_file(path: Path, part: Part | None = None) -> ExtractRequest:
    """Return the request in `path`, for `part` if one is given. A model `./...` is relative to the file.

    Raises:
        RequestError: it cannot be parsed, a field is wrong, or it has another part.
    """
    request = parse_body(ExtractRequest, read_document(path))
    if part is not None:
        if request.part not in (None, part):
            detail = f"{path} has part {request.part}, the command line {part}"
            raise OptionRefused(detail, field="--part", cure="leave out one of them")
        fields = request.model_dump(mode="json") | {"part": part.model_dump(mode="json")}
        request = parse_body(ExtractRequest, fields)
    if request.model.startswith("."):
        beside = os.path.realpath(path.resolve().parent / request.model)
        return request.model_copy(update={"model": beside})
    return request


def read_document(path: Path) -> dict[str, Any]:
    """Return the fields in `path`: JSON if its suffix is `.json`, else YAML. Raises RequestError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        cure = "put the samples into a file source"
        raise RequestError(f"{path} is larger than {MAX_FILE_BYTES} bytes", cure=cure)
    raw = path.read_bytes()
    document = json_in(raw, str(path)) if path.suffix == ".json" else _parse_yaml(path, raw)
    if not isinstance(document, dict):
        raise RequestError(f"{path} holds no fields", cure="give them as 'model: org/name', one a line")
    return document


def json_in(raw: bytes, place: str) -> object:
    """Return the JSON in `raw`, which may begin with a byte order mark. Raises RequestError."""
    return parse_json(raw.removeprefix(BOM_UTF8), place)


def own_roots(settings: Settings, request: ExtractRequest, path: Path) -> Settings:
    """Return settings that let `request`, read from `path`, use what it names; its user can read that anyway.

    A relative source is looked up next to the job file first, then in the current folder.
    """
    base = path.resolve().parent
    # `realpath`: what names a loop of links is refused later, by its field.
    sources = [base, Path.cwd()]
    parts = request.source.sources if isinstance(request.source, MixSource) else [request]
    for file in (part.source for part in parts if isinstance(part.source, FileSource)):
        begin, wild = file.glob
        sources.append(Path(os.path.realpath(base / file.path)).parent)
        if wild:
            sources.append(Path(os.path.realpath(base / begin)))
    models = [Path(request.model).parent] if request.model.startswith("/") else []
    return settings.model_copy(
        update={
            "source_roots": (*sources, *settings.source_roots),
            "model_roots": (*models, *settings.model_roots),
        }
    )


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Refuses a field that a mapping has twice; YAML forbids it, and PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: dict[str, yaml.Node] | None) -> yaml.MappingNode:
        """Read a mapping, before what it merges is among its fields."""
        node = super().compose_mapping_node(anchor)
        names: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE):
            if (key.tag, key.value) in names:
                detail = f"line {key.start_mark.line + 1} has a second {clipped(key.value)!r}"
                raise RequestError(detail, field=clipped(key.value), cure=ONE_OF_THEM)
            names.add((key.tag, key.value))
        return node


def _parse_yaml(path: Path, raw: bytes) -> object:
    try:
        return yaml.load(raw, _Loader)  # noqa: S506 - as safe as its parent
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise RequestError(f"{path} is not YAML: {said}", cure="fix the file, or name it .json") from error
