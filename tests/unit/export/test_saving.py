"""The writers of files, against the libraries that read them."""

import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

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


def states(num_tokens: int) -> torch.Tensor:
    """Return [T, 512] of bfloat16: 1 KiB a token."""
    return torch.randn((num_tokens, 512), generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("num_tokens", [1, 1000, 5001], ids=["small", "of a piece", "of several pieces"])
def test_past_the_page_cache_go_the_bytes_of_torch_itself(tmp_path: Path, num_tokens: int):
    content = {"ids": torch.arange(num_tokens), "states": states(num_tokens), "id": "a", "flag": False}
    due = BytesIO()
    torch.save(content, due)
    save_torch(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == due.getvalue()


@pytest.mark.parametrize("num_tokens", [1, 1000, 5001], ids=["small", "of a piece", "of several pieces"])
def test_a_safetensors_file_is_its_header_and_the_tensors_bytes_and_no_more(tmp_path: Path, num_tokens: int):
    tensors = {"states": states(num_tokens), "ids": torch.arange(num_tokens)}
    save_safetensors(tmp_path / "file", tensors)
    content = (tmp_path / "file").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    assert [one["data_offsets"] for one in header.values()] == [
        [0, 8 * num_tokens],
        [8 * num_tokens, 1032 * num_tokens],
    ]
    due = tensors["ids"].numpy().tobytes() + tensors["states"].view(torch.int16).numpy().tobytes()
    assert content[8 + header_bytes :] == due


def test_a_file_that_fails_midway_is_closed(tmp_path: Path):
    with pytest.raises(AttributeError, match="pickle"):
        save_torch(tmp_path / "file", {"states": states(5001), "function": lambda: None})
    save_torch(tmp_path / "file", {"states": states(1)})
    assert torch.equal(torch.load(tmp_path / "file")["states"], states(1))


def test_an_unknown_dtype_is_no_file(tmp_path: Path):
    with pytest.raises(KeyError):
        save_safetensors(tmp_path / "file", {"a": torch.zeros(1, dtype=torch.complex64)})
    assert not (tmp_path / "file").exists()
