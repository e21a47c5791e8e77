"""What users hold in their hands beside datasets and databases: computed from the code, and compared.

The frozen documents in `surface/` are those of the last release. Only additions pass silently. Whatever is
removed, changed or narrowed needs an entry in CHANGELOG.md, under `Unreleased` and not under `Added`, that
names it in backquotes, as a failing test says. `python -m tests.frozen.refresh` freezes anew, at a release
or before; it refuses a break without an entry, too.
"""

import inspect
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("surface")
CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
PROSE = frozenset({"description", "epilog", "help", "summary", "title"})
NARROWING = frozenset(
    {
        *("additionalProperties", "const", "enum", "format", "pattern", "required", "uniqueItems"),
        *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
        *("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"),
    }
)
"""Keywords of JSON schema that take values away when they are added."""
OPEN = frozenset({"parameters", "properties", "schemas", "$defs"})
"""Keys whose value maps names of ours: any may be added."""

WIDE = 1000
"""Columns: no line of help is folded."""

Path_ = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Break:
    """A change that is no addition. An entry of the changelog must hold one of `names` in backquotes."""

    where: str
    what: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {self.what} (name it: {' or '.join(f'`{name}`' for name in self.names)})"


def current() -> dict[str, Any]:
    """Return every document of today's code by its name."""
    documents = {
        "commands": commands(),
        "errors": errors(),
        "openapi": openapi(),
        "reader": reader(),
        "request": request(),
        "settings": settings(),
    }
    # As it is when it is read from a file.
    result: dict[str, Any] = json.loads(json.dumps(documents))
    return result


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document without the version, which every release changes."""
    from service.api.app import create_app
    from service.settings import Settings

    document = create_app(Settings(_env_file=None)).openapi()  # type: ignore[call-arg]
    del document["info"]["version"]
    return document


def request() -> dict[str, Any]:
    """Return the JSON schema of a job."""
    from schemas.request import ExtractRequest

    return ExtractRequest.model_json_schema()


def settings() -> dict[str, Any]:
    """Return every setting by its variable: type, default and bounds."""
    from service.settings import Settings

    schema = Settings.model_json_schema()
    return {
        "properties": {f"QUARRY_{name.upper()}": one for name, one in schema["properties"].items()},
        "required": [f"QUARRY_{name.upper()}" for name in schema.get("required", ())],
    }


def commands() -> dict[str, Any]:
    """Return what `--help` of every command prints, taken apart into its lines."""
    return dict(_commands("quarry"))


def _commands(name: str) -> Iterator[tuple[str, Any]]:
    said = _help(name)
    yield name, said
    for inner in said.get("Commands", {}):
        yield from _commands(f"{name} {inner}")


def _help(name: str) -> dict[str, Any]:
    """Return the sections of a command's help; every option, argument and command is a key."""
    from service.cli.entry import app

    with io.StringIO() as output, redirect_stdout(output):
        with suppress(SystemExit):
            arguments = [*name.split()[1:], "--help"]
            app(arguments, prog_name="quarry", max_content_width=WIDE, terminal_width=WIDE)
        text = output.getvalue()
    usage, *blocks = re.split(r"\n\n(?=\S|  \S)", text.strip())
    said: dict[str, Any] = {"usage": usage, "help": "\n\n".join(b.strip() for b in blocks if b[0] == " ")}
    for title, _, lines in (block.partition(":\n") for block in blocks if block[0] != " "):
        said[title] = dict(_shown(line) for line in re.split(r"\n(?=  \S)", lines))
    return said


def _shown(line: str) -> tuple[str, dict[str, Any]]:
    """Take a line of help apart; the values that an option may have are a list."""
    form, _, text = re.sub(r"\n\s+", "  ", line.strip()).partition("  ")
    name = re.match(r"-\S+(?:(?: /|,) -\S+)*|\S+", form)[0]  # type: ignore[index]
    prose, _, facts = text.partition("  [") if "  [" in text else (text, "", "")
    limits = facts.rstrip("]").split("; ")
    return name, {
        "values": sorted(form.removeprefix(name).strip(" <>").split("|")),
        "help": prose,
        "limits": [limit for limit in limits if limit != "required"],
        "required": "required" in limits,
    }


def reader() -> dict[str, Any]:
    """Return what `service.reader` exports, with the parameters of each."""
    import service.reader

    made = {name: getattr(service.reader, name) for name in service.reader.__all__}
    return {
        name: {"parameters": {} if issubclass(one, Exception) else _signature(one)}
        for name, one in made.items()
    }


def _signature(made: type[Any]) -> dict[str, Any]:
    """Return the parameters; `place` only of those that may be given by it."""
    return {
        name: {
            "kind": parameter.kind.description,
            "place": None if parameter.kind is parameter.KEYWORD_ONLY else place,
            "required": parameter.default is parameter.empty and not parameter.kind.name.startswith("VAR_"),
            "default": None if parameter.default is parameter.empty else repr(parameter.default),
        }
        for place, (name, parameter) in enumerate(inspect.signature(made).parameters.items())
    }


def errors() -> dict[str, Any]:
    """Return the status and title of every type of problem."""
    from service.errors import QuarryError

    return {
        kind("").problem().type: {"status": kind.status, "title": kind.title} for kind in _kinds(QuarryError)
    }


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for inner in kind.__subclasses__():
        if inner.__module__ == "service.errors":
            yield from _kinds(inner)


def breaks(document: str, old: Any, new: Any) -> list[Break]:
    """Return what is not an addition between two versions of a document."""
    inputs = _inputs(new) | _inputs(old) if document == "openapi" else frozenset()
    return [
        Break(f"{document} {'/'.join(path)}", what, _names(document, path))
        for path, what in _differences(old, new, (), document, inputs)
    ]


def _differences(
    old: Any, new: Any, path: Path_, document: str, inputs: frozenset[str]
) -> Iterator[tuple[Path_, str]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key, value in old.items():
            if key in new:
                yield from _differences(value, new[key], (*path, key), document, inputs)
            else:
                yield (*path, key), "removed"
        for key in new.keys() - old.keys():
            if isinstance(new[key], Mapping) and new[key].get("required") is True:
                yield (*path, key), "added, and required"
            elif key in NARROWING and path and path[-1] not in OPEN:
                yield (*path, key), "added, which narrows"
    elif isinstance(old, list) and isinstance(new, list):
        yield from _differences_of_lists(old, new, path, document, inputs)
    elif old != new or type(old) is not type(new):
        yield path, f"changed from {json.dumps(old)} to {json.dumps(new)}"


def _differences_of_lists(
    old: Sequence[Any], new: Sequence[Any], path: Path_, document: str, inputs: frozenset[str]
) -> Iterator[tuple[Path_, str]]:
    """Compare as sets, and parameters by their names: no list of these documents is ordered."""
    before, after = _by_name(old), _by_name(new)
    if path[-1:] == ("parameters",):
        yield from _differences(before, after, path, document, inputs)
        return
    for key in before.keys() - after.keys():
        yield (*path, key), "removed"
    if path[-1:] == ("limits",) or (path[-1:] == ("required",) and _is_input(document, path, inputs)):
        for key in after.keys() - before.keys():
            yield (*path, key), "added, which narrows"


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    return {
        str(value["name"])
        if isinstance(value, Mapping) and "name" in value
        else value
        if isinstance(value, str)
        else json.dumps(value, sort_keys=True): value
        for value in values
    }


def _is_input(document: str, path: Path_, inputs: frozenset[str]) -> bool:
    """Say whether users write what a schema describes; what they only read may always hold more."""
    if document != "openapi":
        return True
    return path[:2] != ("components", "schemas") or path[2] in inputs


def _inputs(openapi: Any) -> frozenset[str]:
    """Return the schemas that bodies and parameters of requests reach."""
    schemas = openapi.get("components", {}).get("schemas", {})
    operations = [one for item in openapi.get("paths", {}).values() for one in item.values()]
    waiting = [ref for one in operations for ref in _refs([one.get("requestBody"), one.get("parameters")])]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _refs(schemas.get(name))
    return frozenset(found)


def _refs(value: Any) -> list[str]:
    return re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(value))


def _names(document: str, path: Path_) -> tuple[str, ...]:
    """Return what an entry may call a place, from the narrowest to the widest."""
    match document, path:
        case "openapi", ("paths", url, method, *_):
            names = [f"{method.upper()} {url}"]
        case "openapi", ("paths", url):
            names = [url]
        case "openapi", ("components", "schemas", schema, *rest):
            names = [*_field(schema, rest), schema]
        case "request", ("$defs", schema, *rest):
            names = [*_field(schema, rest), schema]
        case "request", rest:
            names = [*_field("ExtractRequest", rest), "ExtractRequest"]
        case "settings", (_, variable, *_):
            names = [variable]
        case "commands", (command, "Options" | "Arguments", one, *_):
            names = [f"{command} {one}", command]
        case "commands", (command, "Commands", one, *_):
            names = [f"{command} {one}"]
        case "reader", (name, _, parameter, *_):
            names = [f"{name}.{parameter}", name]
        case _, (first, *_):
            names = [first]
        case _:
            names = []
    if PROSE & set(path[-1:]):
        names.append(f"the wording of {document}")
    return tuple(names) or (document,)


def _field(schema: str, rest: Sequence[str]) -> list[str]:
    return [f"{schema}.{rest[1]}"] if len(rest) > 1 and rest[0] in ("properties", "required") else []


def entries(changelog: str) -> list[str]:
    """Return the entries under `Unreleased` that speak of what was there before: not those of `Added`."""
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", changelog, flags=re.DOTALL | re.MULTILINE)
    found = []
    for section in re.split(r"^### ", unreleased[1] if unreleased else "", flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if title.strip() != "Added":
            found += re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    return [" ".join(entry.split()) for entry in found]


def unnamed(broken: Sequence[Break], changelog: str) -> list[Break]:
    """Return the breaks that no entry names."""
    named = {name for entry in entries(changelog) for name in re.findall(r"`([^`]+)`", entry)}
    return [one for one in broken if not named.intersection(one.names)]


def frozen() -> dict[str, Any]:
    """Return every document of the last release by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def all_breaks() -> list[Break]:
    """Return every break between the last release and today's code."""
    old, new = frozen(), current()
    found = [Break(name, "removed", (name,)) for name in old.keys() - new.keys()]
    return found + [
        one for name in sorted(old.keys() & new.keys()) for one in breaks(name, old[name], new[name])
    ]
