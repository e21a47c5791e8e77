"""A drafter that goes on keeps its own vocabulary maps, or training says why they cannot be read."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.contract.export.test_in_place import KEPT, ON_CPU
from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow


def test_a_checkpoint_that_goes_on_keeps_its_vocabulary_whatever_drafter_it_is_loaded_into(
    modelled, real, tmp_path
):
    """1. A training. 2. Another drafter has other tokens. 3. It is named; the checkpoint goes on in it."""
    vocab_size = json.loads((real / "config.json").read_text())["vocab_size"]
    ids_D = np.arange(vocab_size - 60, vocab_size)
    np.save(tmp_path / "d2t.npy", ids_D - np.arange(60))
    np.save(tmp_path / "t2d.npy", np.isin(np.arange(vocab_size), ids_D))
    maps = ["--d2t-path", str(tmp_path / "d2t.npy"), "--t2d-path", str(tmp_path / "t2d.npy")]
    out, other, options = str(tmp_path / "out"), str(tmp_path / "other"), [*ON_CPU, "--num-workers", "0"]
    size = options.index("--draft-vocab-size")
    without_size = options[:size] + options[size + 2 :]
    runs = [
        (str(modelled), *options, "--epochs", "1", "--save-path", out),
        (str(modelled), *options, *maps, "--dry-run", "--save-path", other),
        (str(modelled), *without_size, "--epochs", "2", "--from-pretrained", other, "--save-path", out),
        (str(modelled), *options, *maps, "--save-path", out),
    ]
    heads, refused = loaded_by(KEPT, json.dumps(runs), result=tmp_path / "result.pt")
    (kept_V, _), (t2d_V, is_own) = heads
    assert torch.equal(t2d_V, kept_V) and is_own
    assert refused == "d2t_path"


NAMED = """
import json, sys
import numpy as np
import torch
from service.errors import OptionRefused
from service.trainers.speculators import train
from speculators.train import cli

def look(config):
    path = config.flatten()["t2d_path"]
    found.append(path and np.load(path).tolist())

cli.main, found = look, []
for dataset, live, *options in json.loads(sys.argv[1]):
    try:
        train(dataset, options, live=live)
    except OptionRefused as refused:
        found.append([refused.field, refused.detail, refused.cure])
torch.save(found, sys.argv[2])
"""
MAPS = {"d2t": torch.tensor([1, 2]), "t2d": torch.tensor([False, True, False, True])}


def drafter(folder: Path, maps: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"lm_head.weight": torch.zeros(2, 2), **maps}, folder / "model.safetensors")
    return folder


def test_a_checkpoint_that_a_kill_left_aside_is_put_back_before_its_vocabulary_is_asked_for(
    dataset, tmp_path
):
    """A training on a job's rows was killed while it replaced its checkpoint."""
    drafter(tmp_path / "out" / "earlier", MAPS)
    live = "http://127.0.0.1:9/jobs/j-0123456789abcdef"
    words = ["--draft-vocab-size", "2", "--save-path", str(tmp_path / "out")]
    found = loaded_by(NAMED, json.dumps([(str(dataset), live, *words)]), result=tmp_path / "result.pt")
    assert found == [MAPS["t2d"].tolist()]


def test_maps_that_cannot_be_read_are_refused_with_a_cure_and_not_taken_for_none(dataset, tmp_path):
    """1. It has none, and drafts from the whole vocabulary. 2. Its index is cut. 3. One map. 4. No index.

    5. A kill left half a file. 6. Its index is empty.
    """
    names = ("none", "cut", "one", "pickled", "half", "empty")
    none, cut, one, pickled, half, empty = folders = [tmp_path / name for name in names]
    drafter(none, {})
    (drafter(cut, MAPS) / "model.safetensors.index.json").write_text('{"weight_map": {')
    drafter(one, {"d2t": MAPS["d2t"]})
    (drafter(pickled, MAPS) / "model.safetensors").rename(pickled / "pytorch_model.bin")
    os.truncate(drafter(half, MAPS) / "model.safetensors", 60)
    (drafter(empty, MAPS) / "model.safetensors.index.json").write_text("{}")
    words = ["--draft-vocab-size", "2", "--save-path", str(tmp_path / "out"), "--from-pretrained"]
    cases = [(str(dataset), None, *words, str(folder)) for folder in folders]
    nothing, *refused = loaded_by(NAMED, json.dumps(cases), result=tmp_path / "result.pt")
    assert nothing is None
    for folder, (field, detail, cure) in zip(folders[1:], refused, strict=True):
        assert (field, str(folder) in detail, bool(cure)) == ("from_pretrained", True, True)
