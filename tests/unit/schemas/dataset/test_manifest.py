"""Manifests that say what none of ours says are refused by name, not met as an error later."""

from pathlib import Path

import pytest

from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import read_manifest
from schemas.digest import canonical_json
from tests.support.finished_job import a_canary, a_dataset


def test_a_canary_of_no_layers_is_no_canary(tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path)
    report = a_canary().model_copy(update={"layers": ()})
    checks = manifest.checks.model_copy(update={"canary_report": report})
    content = canonical_json(manifest.model_copy(update={"checks": checks}).model_dump(mode="json")).encode()
    with pytest.raises(DatasetError, match=r"m\.json is not a manifest .*canary_report\.layers"):
        read_manifest(content, "m.json")
