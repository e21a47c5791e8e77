"""speculators' training command takes its verifier for the target of the dataset only if it is."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow

REFUSED = """
import json, sys
import torch
from service.errors import OptionRefused
from service.trainers.speculators import train
from speculators.train import cli

cli.main, found = lambda config: found.append(None), []
dataset, *verifiers = json.loads(sys.argv[1])
for verifier in verifiers:
    try:
        train(dataset, ["--verifier-name-or-path", verifier])
    except OptionRefused as refused:
        found.append([refused.field, refused.detail, refused.cure])
torch.save(found, sys.argv[2])
"""


def copy(
    target: Path, folder: Path, *, scale: float = 1.0, prefix: str = "", dtype: torch.dtype = torch.float32
) -> str:
    """Copy a target, with its final norm multiplied, its tensors renamed, and in another dtype."""
    shutil.copytree(target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= scale
    named = {prefix + name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors")
    return str(folder)


def test_a_verifier_with_another_final_norm_than_the_datasets_target_is_refused(modelled, real, tmp_path):
    """1. A copy, also with a prefix or in fewer bits, is the target. 2. One that was trained on is not."""
    same = copy(real, tmp_path / "same")
    inside = copy(real, tmp_path / "inside", prefix="language_model.")
    half = copy(real, tmp_path / "half", dtype=torch.bfloat16)
    other = copy(real, tmp_path / "other", scale=1.01)
    words = json.dumps([str(modelled), same, inside, half, other])
    *allowed, (field, detail, cure) = loaded_by(REFUSED, words, result=tmp_path / "result.pt")
    assert allowed == [None, None, None]
    assert field == "verifier_name_or_path" and other in detail and cure
