"""An export writes no state whose checksum does not agree."""

import shutil

import pytest

from service.errors import SourceRefused
from service.export.options import FormatName
from service.export.run import export
from tests.contract.export.conftest import LAST, files_of, wanted
from tests.support.file_plants import flip_bit, page


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
