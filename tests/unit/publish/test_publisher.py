"""The final norm of the model that was captured, read for publishing."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from service.errors import IdentityChanged
from service.plan.model_folder import ModelFolder, content_of
from service.publish.publisher import target_final_norm
from service.store import PublishLease
from service.store.values import TaskKind
from tests.support.api import api_settings, small_target
from tests.support.finished_job import an_identity


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = small_target(tmp_path / "model")
    save_file({"model.norm.weight": torch.arange(64, dtype=torch.float32)}, folder / "model.safetensors")
    return folder


def a_lease(model: Path) -> PublishLease:
    identity = an_identity(model=f"./{model.name}", **asdict(content_of(ModelFolder(model))))
    return PublishLease(
        kind=TaskKind.PUBLISH,
        job_id="0" * 32,
        item=0,
        epoch=1,
        attempts=1,
        owner="publisher",
        ttl_s=60.0,
        model=str(model),
        identity=identity,
        provenance=None,
        captured_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_the_final_norm_is_read_from_the_weights(model: Path, tmp_path: Path) -> None:
    content = target_final_norm(a_lease(model), api_settings(tmp_path))
    assert torch.equal(load(content)["weight"], torch.arange(64, dtype=torch.float32))


def test_a_model_that_was_changed_since_is_refused(model: Path, tmp_path: Path) -> None:
    lease = a_lease(model)
    (model / "generation_config.json").write_text("{}")
    with pytest.raises(IdentityChanged) as changed:
        target_final_norm(lease, api_settings(tmp_path))
    assert changed.value.field == "model"
