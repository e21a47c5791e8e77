"""An export writes no state whose checksum does not agree; training checks its tokens, too, if asked to."""

import shutil

import pytest

from benchmarks.dataset import Shape, write_dataset
from service.errors import SourceRefused
from service.export.options import FormatName
from service.export.run import export
from tests.contract.export.conftest import LAST, files_of, wanted
from tests.contract.export.test_in_place import unweighted
from tests.support.file_plants import flip_bit, page
from tests.support.trainers import loaded_by


@pytest.mark.parametrize("to", FormatName)
def test_a_flipped_bit_ends_the_export_by_the_name_of_shard_row_and_layer(dataset, tmp_path, to):
    folder = shutil.copytree(dataset, tmp_path / "copy")
    shard = min(folder.glob("data/*/*.parquet"))
    flip_bit(shard, page(shard, 2, f"layer_{LAST}")[1] - 2)
    with pytest.raises(SourceRefused, match=rf"{shard.name}: row 2: layer {LAST}: its bytes have") as refused:
        export(str(folder), tmp_path / "out", wanted(to))
    assert refused.value.field == "dataset"
    assert "quarry verify" in str(refused.value.cure)


def test_layers_that_are_not_written_are_not_checked(dataset, tmp_path):
    folder = shutil.copytree(dataset, tmp_path / "copy")
    for shard in folder.glob("data/*/*.parquet"):
        flip_bit(shard, page(shard, 0, "layer_5")[1] - 2)
    for source, out in ((dataset, "due"), (folder, "out")):
        export(str(source), tmp_path / out, wanted("modelopt", layers=(2, 4)))
    assert files_of(tmp_path / "out/data") == files_of(tmp_path / "due/data")


TOLD = """
import shutil, sys
import torch
from service.errors import QuarryError
from service.trainers.speculators import train
from speculators.train import cli

dataset, index, sound, target, ids, result = sys.argv[1:]
options = ["--verifier-name-or-path", target, "--data-path", ids]

def told(**checked):
    try:
        train(dataset, options, **checked)
    except QuarryError as error:
        return f"{error.field}: {error}"

cli.main = lambda config: None
every = [told(), told(check=True)]
shutil.copy(sound, index)
torch.save([*every, told(check=True), told()], result)
"""


@pytest.mark.slow
def test_training_takes_its_tokens_from_a_checked_index_if_asked_to(target, tmp_path):
    """1. Without checks a damaged index is read, and its tokens are kept. 2. With checks it is named.

    3. The sound one is not trained on with the tokens that were kept, 4. which a run without checks takes.
    """
    write_dataset(tmp_path / "dataset", tmp_path, Shape(2, shortest=256, longest=300, hidden_size=64))
    index = min((tmp_path / "dataset").glob("index/*/*.parquet"))
    sound = shutil.copy(index, tmp_path / "sound")
    flip_bit(index, page(index, 0, "input_ids")[1] - 3)
    words = (tmp_path / "dataset", index, sound, unweighted(target, tmp_path), tmp_path / "ids")
    unchecked, damaged, kept, again = loaded_by(TOLD, *words, result=tmp_path / "result.pt")
    assert unchecked is again is None
    assert damaged.startswith("dataset:") and f"{index.name} has sha256" in damaged
    assert kept.startswith("data_path:") and "something else than checked ids" in kept
