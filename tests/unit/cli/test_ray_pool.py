"""What `quarry ray` says when it cannot work."""

import socket
import sys

import pytest

from tests.unit.cli.conftest import Run


def test_without_ray_it_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "service.ray_pool", raising=False)
    ran = run("ray", "status")
    assert ran.code == 2
    assert "pip install 'eagle-quarry[ray]'" in ran.err


def test_sqlite_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("QUARRY_DATA_DIR", str(tmp_path))
    ran = run("ray", "up", "--workers", 2)
    assert ran.code == 2
    assert "field: database_url" in ran.err and "QUARRY_DATABASE_URL=postgresql" in ran.err


def test_a_cluster_that_does_not_answer_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("QUARRY_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("QUARRY_DATABASE_URL", "postgresql+psycopg://quarry@/quarry")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        ran = run("ray", "status", "--address", address)
    assert ran.code == 2 and address in ran.err
    assert "field: address" in ran.err and "--address HOST:PORT" in ran.err


def test_what_is_no_address_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("QUARRY_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("QUARRY_DATABASE_URL", "postgresql+psycopg://quarry@/quarry")
    ran = run("ray", "status", "--address", "nonsense")
    assert ran.code == 2 and "field: address" in ran.err
