"""The writers of files, against the libraries that read them."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from service.errors import IdentityChanged
from service.export.record import begin
from service.export.saving import save_safetensors, save_torch

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


def test_the_library_reads_what_was_written(tmp_path: Path):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{number}-{dtype}": torch.randint(0, 2, shape, generator=draw).to(dtype)
        for dtype in DTYPES
        for number, shape in enumerate([(3,), (5, 7), (2, 1, 3), (0, 4), ()])
    }
    save_safetensors(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_tensor_whose_rows_lie_apart_is_written_in_order(tmp_path: Path):
    whole = torch.arange(24).view(4, 6)
    save_safetensors(tmp_path / "file", {"part": whole[:, 1:3], "turned": whole.T})
    found = load_file(tmp_path / "file")
    assert torch.equal(found["part"], whole[:, 1:3])
    assert torch.equal(found["turned"], whole.T)


def test_the_same_tensors_give_the_same_bytes_in_any_order(tmp_path: Path):
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.uint8), "c": torch.ones(1)}
    save_safetensors(tmp_path / "once", tensors)
    save_safetensors(tmp_path / "again", dict(reversed(tensors.items())))
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()
    with safe_open(tmp_path / "once", "pt") as file:
        assert set(file.keys()) == set(tensors)


@pytest.mark.parametrize("num_tokens", [1, 5001])
def test_torch_writes_the_same_bytes_whatever_the_file_is_called(tmp_path: Path, num_tokens: int):
    states = torch.randn((num_tokens, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
    content = {"ids": torch.arange(num_tokens), "states": states, "id": "a", "flag": False}
    expected = BytesIO()
    torch.save(content, expected)
    save_torch(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == expected.getvalue()


def test_an_error_keeps_no_view_of_what_could_not_be_written(tmp_path: Path):
    """With one left, the collector reports an error; on Python 3.12.1 it ends the process."""
    with pytest.raises(IsADirectoryError) as error:
        save_torch(tmp_path, torch.zeros(8))
    values = [value for entry in error.traceback for value in entry.locals.values()]
    (written,) = (value for value in values if isinstance(value, BytesIO))
    written.truncate(0)  # a BufferError while there is a view


def test_an_export_that_goes_on_without_a_promise_does_not_keep_it(tmp_path: Path) -> None:
    """1. A checked one is killed. 2. One without checks goes on. 3. A checked one takes nothing of it."""
    plain = {"format": "ids"}
    checked = plain | {"checked": True}
    assert not begin(tmp_path, checked) and not begin(tmp_path, checked)
    assert not begin(tmp_path, plain)
    with pytest.raises(IdentityChanged, match="begun with checked null"):
        begin(tmp_path, checked)
