"""What users hold in their hands changes only by additions, or by an entry of the changelog that names it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.frozen import refresh
from tests.frozen.surface import CHANGELOG, Break, all_breaks, breaks, current, entries, frozen, unnamed

REFRESH = "\nwrite entries in CHANGELOG.md under Unreleased, not under Added, that name these in backquotes"


def test_nothing_was_taken_away_or_changed_without_an_entry_in_the_changelog() -> None:
    left = unnamed(all_breaks(), CHANGELOG.read_text())
    assert not left, "\n".join(map(str, left)) + REFRESH


def schemas(**changes: Any) -> dict[str, Any]:
    """Return a description of one route that takes `In` and returns `Out`; `changes` are of both."""
    fields = {"a": {"type": "integer", "maximum": 5}, "b": {"enum": ["x", "y"], "title": "B"}}
    schema = {"type": "object", "properties": fields, "required": ["a"]} | changes
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/In"}}}
    parameters = [{"name": "dry", "in": "query", "required": False, "schema": {"type": "boolean"}}]
    return {
        "paths": {"/jobs": {"post": {"parameters": parameters, "requestBody": {"content": content}}}},
        "components": {"schemas": {"In": copy.deepcopy(schema), "Out": copy.deepcopy(schema)}},
    }


COMMANDS = {
    "quarry verify": {
        "help": "Check.",
        "Options": {
            "--to": {"values": ["a", "b"], "help": "Whose.", "limits": ["default: 1"], "required": False}
        },
    }
}
SETTINGS = {"properties": {"QUARRY_PORT": {"default": 8642, "type": "integer"}}, "required": []}
READER = {"Mtp": {"parameters": {"steps": {"default": None, "required": True}}}}
ERRORS = {"urn:quarry:lost": {"status": 503}}
DOCUMENTS = {
    "openapi": schemas(),
    "request": {
        "$defs": {"Storage": {"properties": {"kind": {"enum": ["x", "y"]}}}},
        "properties": {"model": {}},
    },
    "commands": COMMANDS,
    "settings": SETTINGS,
    "reader": READER,
    "errors": ERRORS,
}

ROUTE, IN, OUT = "paths/+jobs", "components/schemas/In", "components/schemas/Out"
GONE = object()


def changed(document: str, where: str, value: Any) -> dict[str, Any]:
    """Return a document whose value at `where`, a path of keys, is set, appended (`-`) or taken out."""
    new = copy.deepcopy(DOCUMENTS[document])
    *path, last = (int(key) if key.isdigit() else key.replace("+", "/") for key in where.split("/"))
    place: Any = new
    for key in path:
        place = place[key]
    if value is GONE:
        del place[last]
    elif last == "-":
        place.append(value)
    else:
        place[last] = value
    return new


@pytest.mark.parametrize(
    ("document", "where", "value"),
    [
        ("openapi", "paths/+new", {"get": {}}),
        ("openapi", f"{ROUTE}/get", {"parameters": [{"name": "x", "required": True}]}),
        ("openapi", f"{ROUTE}/post/parameters/-", {"name": "x", "in": "query", "required": False}),
        ("openapi", "components/schemas/New", {"required": ["a"]}),
        ("openapi", f"{IN}/properties/c", {"type": "string", "maxLength": 3}),
        ("openapi", f"{IN}/properties/pattern", {"type": "string"}),
        ("openapi", f"{IN}/properties/b/enum/-", "z"),
        ("openapi", f"{IN}/description", "said now"),
        ("openapi", f"{OUT}/required/-", "b"),
        ("request", "properties/new", {"type": "string"}),
        ("request", "$defs/Storage/properties/kind/enum/-", "z"),
        ("commands", "quarry new", {"Options": {}}),
        ("commands", "quarry verify/Options/--new", {"required": False}),
        ("commands", "quarry verify/Options/--to/values/-", "c"),
        ("settings", "properties/QUARRY_NEW", {"default": None}),
        ("reader", "New", {"parameters": {"x": {"required": True}}}),
        ("reader", "Mtp/parameters/new", {"default": "None", "required": False}),
        ("errors", "urn:quarry:new", {"status": 500}),
    ],
)
def test_an_addition_passes_silently(document: str, where: str, value: Any) -> None:
    new = changed(document, where, value)
    assert new != DOCUMENTS[document]
    assert breaks(document, DOCUMENTS[document], new) == []


@pytest.mark.parametrize(
    ("document", "where", "value", "name"),
    [
        ("openapi", ROUTE, GONE, "/jobs"),
        ("openapi", f"{ROUTE}/post", GONE, "POST /jobs"),
        ("openapi", f"{ROUTE}/post/parameters/0", GONE, "POST /jobs"),
        ("openapi", f"{ROUTE}/post/parameters/0/required", True, "POST /jobs"),
        (
            "openapi",
            f"{ROUTE}/post/parameters/-",
            {"name": "x", "in": "query", "required": True},
            "POST /jobs",
        ),
        ("openapi", f"{IN}/required/-", "b", "In.b"),
        ("openapi", f"{IN}/properties/a/maximum", 4, "In.a"),
        ("openapi", f"{IN}/properties/a/minimum", 0, "In.a"),
        ("openapi", f"{IN}/properties/a/type", "string", "In.a"),
        ("openapi", f"{IN}/properties/b/enum/0", GONE, "In.b"),
        ("openapi", f"{IN}/properties/b/pattern", "x+", "In"),
        ("openapi", f"{IN}/additionalProperties", False, "In"),
        ("openapi", f"{OUT}/properties/a", GONE, "Out.a"),
        ("openapi", f"{OUT}/required/0", GONE, "Out.a"),
        ("openapi", f"{OUT}/properties/b/title", "C", "the wording of openapi"),
        ("openapi", IN, GONE, "In"),
        ("request", "properties/model", GONE, "ExtractRequest.model"),
        ("request", "$defs/Storage/properties/kind/enum/1", GONE, "Storage.kind"),
        ("request", "$defs/Storage/required", ["kind"], "Storage"),
        ("commands", "quarry verify", GONE, "quarry verify"),
        ("commands", "quarry verify/help", "Check it.", "the wording of commands"),
        ("commands", "quarry verify/Options/--to", GONE, "quarry verify --to"),
        ("commands", "quarry verify/Options/--to/required", True, "quarry verify --to"),
        ("commands", "quarry verify/Options/--to/values/0", GONE, "quarry verify --to"),
        ("commands", "quarry verify/Options/--to/limits/0", "default: 2", "quarry verify"),
        ("commands", "quarry verify/Options/--to/limits/-", "x>=1", "quarry verify --to"),
        ("commands", "quarry verify/Options/--new", {"required": True}, "quarry verify --new"),
        ("settings", "properties/QUARRY_PORT", GONE, "QUARRY_PORT"),
        ("settings", "properties/QUARRY_PORT/default", 80, "QUARRY_PORT"),
        ("settings", "properties/QUARRY_PORT/maximum", 80, "QUARRY_PORT"),
        ("settings", "required/-", "QUARRY_PORT", "QUARRY_PORT"),
        ("reader", "Mtp", GONE, "Mtp"),
        ("reader", "Mtp/parameters/steps/default", "3", "Mtp.steps"),
        ("reader", "Mtp/parameters/new", {"required": True}, "Mtp.new"),
        ("errors", "urn:quarry:lost", GONE, "urn:quarry:lost"),
        ("errors", "urn:quarry:lost/status", 500, "urn:quarry:lost"),
    ],
)
def test_anything_else_needs_an_entry_that_names_it(document: str, where: str, value: Any, name: str) -> None:
    found = breaks(document, DOCUMENTS[document], changed(document, where, value))
    assert found
    silent = (
        "# Changelog\n\n## [Unreleased]\n\n### {}\n\n- A thing: {}.\n\n## 1.0.0\n\n### Changed\n\n- `{}`.\n"
    )
    assert unnamed(found, silent.format("Changed", f"`another` than {name}", name)) == found
    assert unnamed(found, silent.format("Added", f"`{name}`", name)) == found
    assert unnamed(found, silent.format("Removed", f"`{name}`", "")) == []


@pytest.mark.slow
def test_refreshing_freezes_today_unless_a_break_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refresh, "FOLDER", tmp_path)
    monkeypatch.setattr(refresh, "all_breaks", lambda: [Break("settings", "removed", ("QUARRY_GONE",))])
    assert refresh.main() == 1
    assert "name it: `QUARRY_GONE`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(refresh, "all_breaks", list)
    assert refresh.main() == 0
    assert {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()} == current()


def test_a_document_that_is_gone_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    today = current()
    del today["settings"]
    monkeypatch.setattr("tests.frozen.surface.current", lambda: today)
    assert "settings removed" in [f"{one.where} {one.what}" for one in all_breaks()]


def test_the_documents_hold_what_they_are_named_for() -> None:
    """An empty document could not be broken."""
    documents = frozen()
    assert "POST /extract" in {
        f"{method.upper()} {path}" for path, item in documents["openapi"]["paths"].items() for method in item
    }
    assert documents["commands"]["quarry export"]["Options"]["--to"]["required"]
    assert "speculators" in documents["commands"]["quarry export"]["Options"]["--to"]["values"]
    assert documents["commands"]["quarry jobs watch"]["Arguments"]
    assert documents["settings"]["properties"]["QUARRY_PORT"]["default"] == 8642
    assert (
        "ExtractRequest" not in documents["request"]["$defs"]
        and "model" in documents["request"]["properties"]
    )
    assert documents["errors"]["urn:quarry:disk-full"]["status"] == 507
    assert documents["reader"]["Mtp"]["parameters"]["num_steps"]["required"]


def test_entries_are_those_of_the_next_release_that_add_nothing() -> None:
    unreleased = "## [Unreleased]\n\n### Added\n\n- a\n\n### Fixed\n\n- b,\n  and c\n- d\n"
    assert entries(f"{unreleased}\n## 0.1.0\n\n### Fixed\n\n- e\n") == ["b, and c", "d"]
