"""One right dataset, made once, and a copy of it for each test that spoils it."""

import shutil
from dataclasses import replace

import pytest

from tests.support.reference_models import TinyModel
from tests.support.shards import (
    capture,
    write_dataset,
)
from tests.unit.proof.made_dataset import UNITS, Dataset


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    model = TinyModel(root / "model", "llama", "bfloat16")
    units = {unit: capture(model, dtype="bfloat16", unit=unit) for unit in range(UNITS)}
    write_dataset(root / "made", units)
    return Dataset(root / "made", units)


@pytest.fixture
def dataset(made, tmp_path):
    shutil.copytree(made.folder, tmp_path / "dataset")
    return replace(made, folder=tmp_path / "dataset")
