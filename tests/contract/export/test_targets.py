"""What an export takes of a target is that of the dataset's model."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from service.errors import OptionRefused
from service.export.options import Algorithm, FormatName
from service.export.run import export
from tests.contract.export.conftest import wanted
from tests.contract.export.test_run import with_manifest
from tests.support.parquet import tell
from tests.support.shards import entry_of

EAGLE3 = {"algorithm": Algorithm.EAGLE3, "draft_vocab": 60}


def of_the_hub(modelled, copy):
    """Return a copy of a dataset whose target is known by its commit, not by its weights."""

    def change(body: dict) -> None:
        identity = body["provenance"]["identity"]
        tell(copy, f'"weights_sha256":"{identity["weights_sha256"]}"'.encode(), b'"weights_sha256":null')
        identity["weights_sha256"] = None
        for entry in body["shards"]:
            entry.update(entry_of(copy, entry["path"]).model_dump())
        body["totals"]["bytes"] = sum(entry["bytes"] for entry in body["shards"])

    return with_manifest(modelled, copy, change, sealed=True)


def changed(real, folder, name: str):
    """Return a copy of a target with one tensor changed."""
    shutil.copytree(real, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("changes", [{}, EAGLE3])
@pytest.mark.parametrize(
    ("tensor", "told"),
    [("model.embed_tokens.weight", "other weights"), ("model.norm.weight", "another final norm")],
)
def test_nemo_refuses_another_model(modelled, real, tmp_path, changes, tensor, told):
    other = changed(real, tmp_path / "other", tensor)
    with pytest.raises(OptionRefused, match=f"{told} than the dataset: it is another model") as refused:
        export(str(modelled), tmp_path / "out", wanted("nemo", **changes, target=str(other)))
    assert refused.value.field == "target"
    assert not (tmp_path / "out").exists()
    assert export(str(modelled), tmp_path / "out", wanted("nemo", **changes, target=str(real))).rows == 12


@pytest.mark.parametrize("to", sorted(set(FormatName) - {FormatName.NEMO}))
def test_no_trainer_is_sent_to_the_head_of_another_model(modelled, real, tmp_path, to):
    other = changed(real, tmp_path / "other", "model.norm.weight")
    with pytest.raises(OptionRefused, match="another final norm than the dataset") as refused:
        export(str(modelled), tmp_path / "out", wanted(to, target=str(other)))
    assert refused.value.field == "target"
    assert not (tmp_path / "out").exists()


def test_a_target_without_weights_here_can_be_named(modelled, real, tmp_path):
    (tmp_path / "light").mkdir()
    shutil.copy(real / "config.json", tmp_path / "light")
    options = wanted("modelopt", target=str(tmp_path / "light"), draft_vocab=9)
    assert export(str(modelled), tmp_path / "out", options).rows == 12


@pytest.mark.parametrize("changes", [{}, EAGLE3])
def test_nemo_refuses_another_norm_where_the_weights_are_not_known(modelled, real, tmp_path, changes):
    """As of a model on the Hub, which a dataset knows by its commit."""
    hub = of_the_hub(modelled, tmp_path / "hub")
    other = changed(real, tmp_path / "other", "model.norm.weight")
    with pytest.raises(OptionRefused, match="another final norm than the dataset"):
        export(str(hub), tmp_path / "out", wanted("nemo", **changes, target=str(other)))
    assert export(str(hub), tmp_path / "out", wanted("nemo", **changes, target=str(real))).rows == 12


def test_a_target_that_is_nowhere_to_be_found_is_named(modelled, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARRY_MODEL_ROOTS", "[]")
    told = "no folder of QUARRY_MODEL_ROOTS holds the dataset's target, "
    with pytest.raises(OptionRefused, match=told) as refused:
        export(str(modelled), tmp_path / "out", wanted("nemo"))
    assert refused.value.field == "target"


def test_a_target_in_another_folder_is_the_same_model(modelled, real, tmp_path):
    moved = shutil.copytree(real, tmp_path / "moved")
    (moved / "README.md").write_text("mine")
    export(str(modelled), tmp_path / "out", wanted("nemo", target=str(moved)))
    assert json.loads((tmp_path / "out/manifest.json").read_text())["target_model"] == str(moved)
