"""What tests of several parts share."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets these distributions alone be installed."""

    def install(distributions: dict[str, str]) -> None:
        for name, version in distributions.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return install
