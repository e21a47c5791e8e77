"""A finished dataset of the fake engine, and what every exported tensor of it must be."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from schemas.job import JobState
from service.export.options import ExportOptions, FormatName, chosen_algorithm
from tests.contract.reader.conftest import finished
from tests.support.fake_engine import states_TH
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target

HIDDEN = 64
LAST = 8
AUX = (2, 4, 5)


@pytest.fixture(scope="session", autouse=True)
def model_roots(target: Path, real: Path) -> Iterator[None]:
    """Let exports find the models of the datasets, which name a folder without its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARRY_MODEL_ROOTS", json.dumps([str(target.parent), str(real.parent)]))
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return finished(tmp_path_factory.mktemp("dataset"), target, storage={"shard_bytes": 262_144})


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a float32 target whose states are those of a transformers forward pass."""
    folder = tmp_path_factory.mktemp("models") / "real"
    return random_target(folder, hidden=HIDDEN, dtype="float32", max_position=512)


@pytest.fixture(scope="session")
def modelled(tmp_path_factory: pytest.TempPathFactory, real: Path) -> Path:
    """Return a dataset of that target."""
    folder = tmp_path_factory.mktemp("modelled")
    shop = Shop.open(folder, real, engine="tests.support.model_engine:ModelEngine")
    try:
        job = shop.run(request(real, conversations(12)))
        assert job.state is JobState.COMPLETED, job.problem
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


@dataclass(frozen=True)
class Truth:
    """A row as the index has it, and its states from the fake engine's formula."""

    sample_id: str
    ids: torch.Tensor
    mask: torch.Tensor
    norm_H: torch.Tensor

    def layer(self, layer_id: int) -> torch.Tensor:
        return states_TH(self.ids.tolist(), layer_id, HIDDEN, "bfloat16")

    def aux(self, layer_ids: tuple[int, ...] = AUX) -> torch.Tensor:
        return torch.cat([self.layer(layer_id) for layer_id in layer_ids], dim=-1)

    def post(self) -> torch.Tensor:
        last = self.layer(LAST).float()
        normed = last / torch.sqrt((last * last).mean(-1, keepdim=True) + 1e-6)
        return normed.bfloat16() * self.norm_H


def truths_of(dataset: Path) -> Iterator[Truth]:
    norm_H = load_file(dataset / "final_norm.safetensors")["weight"]
    for path in sorted(dataset.glob("index/*/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
            yield Truth(row["sample_id"], ids, mask, norm_H)


@pytest.fixture(scope="session")
def truths(dataset: Path) -> list[Truth]:
    return list(truths_of(dataset))


@pytest.fixture(scope="session")
def counts(truths: list[Truth]) -> dict[int, int]:
    """How often each token is supervised, counted from the rows."""
    every = pa.array([token for row in truths for token in row.ids[row.mask == 1].tolist()])
    return {pair["values"]: pair["counts"] for pair in every.value_counts().to_pylist()}


def wanted(name: str, **changes: object) -> ExportOptions:
    """Return a format's options; where the trainer needs a draft vocabulary, one is given."""
    to = FormatName(name)
    given = {"to": to, "algorithm": chosen_algorithm(to, None)}
    given |= {"draft_vocab": 40} if to is FormatName.ANGELSLIM else {}
    return ExportOptions(**given | changes)  # type: ignore[arg-type]


def close(got: torch.Tensor, due: torch.Tensor) -> bool:
    """Say whether post-norm states agree within one rounding of bfloat16."""
    return got.dtype == due.dtype and torch.allclose(got.float(), due.float(), rtol=2**-7, atol=1e-6)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
