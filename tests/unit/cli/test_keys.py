"""`quarry keys`, and how every verb that talks to a service sends a key."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api import api_settings, serving
from tests.unit.cli.conftest import Run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "admin").write_text("a" * 32)
    with serving(api_settings(tmp_path, admin_key_file=tmp_path / "admin")) as client:
        yield str(client.base_url)


def test_a_key_is_made_used_listed_and_revoked(
    run: Run, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--server", server)
    refused = run("jobs", "list", *at)
    assert (refused.code, "quarry keys add" in refused.err) == (3, True)
    monkeypatch.setenv("QUARRY_KEY_FILE", str(tmp_path / "admin"))
    made = run("keys", "add", "team-a", "--scope", "jobs:read", "--scope", "jobs:write", "--days", 30, *at)
    assert (made.code, made.out.startswith("qk_")) == (0, True)
    second = json.loads(run("keys", "add", "team-b", "--scope", "jobs:read", "--json", *at).out)
    every = [json.loads(line) for line in run("keys", "list", "--json", *at).out.splitlines()]
    assert (every[1]["id"], second["key"][3:11]) == (second["id"], second["id"])
    listed = run("keys", "list", *at).out
    assert "team-a" in listed and "jobs:read jobs:write" in listed and made.out[3:11] in listed
    monkeypatch.delenv("QUARRY_KEY_FILE")
    monkeypatch.setenv("QUARRY_KEY", made.out.strip())
    assert run("jobs", "list", *at).code == 0
    assert run("keys", "list", *at).code == 3
    monkeypatch.setenv("QUARRY_KEY", "a" * 32)
    assert "revoked" in run("keys", "revoke", made.out[3:11], *at).out
    monkeypatch.setenv("QUARRY_KEY", made.out.strip())
    assert run("jobs", "list", *at).code == 3


def test_options_that_no_key_has_are_refused_before_anything_is_sent(run: Run, server: str) -> None:
    refused = run(
        "keys", "add", "team-a", "--scope", "jobs:read", "--source-root", "data", "--server", server
    )
    assert (refused.code, "source_roots" in refused.err) == (2, True)
