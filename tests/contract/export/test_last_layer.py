"""The last layer among the auxiliary ones is what the trainer takes there, or is refused."""

import pytest
import torch
from safetensors.torch import load_file

from service.errors import OptionRefused
from service.export.options import Algorithm
from service.export.run import export
from tests.contract.export.conftest import HIDDEN, LAST, close, wanted
from tests.contract.export.test_formats import ckpt, loaded, read_deepspec

LAYERS = (2, 5, LAST)


BEFORE_THE_NORM = {
    ("speculators", Algorithm.EAGLE3): lambda out, _: load_file(out / "hidden_states/hs_0.safetensors")[
        "hidden_states"
    ][:, :3].flatten(1),
    ("specforge", Algorithm.EAGLE3): lambda out, _: ckpt(out / "data", 0)["aux_hidden_state"][0],
    ("specforge", Algorithm.DFLASH): lambda out, _: ckpt(out / "data", 0)["hidden_states"][0],
    ("torchspec", Algorithm.EAGLE3): lambda out, truth: next(
        row for path in (out / "samples").iterdir() if (row := loaded(path))["data_id"] == truth.sample_id
    )["hidden_states"][0],
    ("deepspec", Algorithm.DSPARK): lambda out, _: read_deepspec(out, 0, 3)["target_hidden_states"],
    ("nemo", Algorithm.EAGLE3): lambda out, truth: load_file(out / "shard-000000.safetensors")[
        "aux_hidden_states"
    ][0, : len(truth.ids)],
}


@pytest.mark.parametrize(("to", "algorithm"), BEFORE_THE_NORM)
def test_most_trainers_take_it_before_the_norm(dataset, truths, tmp_path, to, algorithm):
    draft_vocab = 60 if to == "nemo" else None
    options = wanted(to, algorithm=algorithm, layers=LAYERS, draft_vocab=draft_vocab)
    export(str(dataset), tmp_path / "out", options)
    assert torch.equal(BEFORE_THE_NORM[to, algorithm](tmp_path / "out", truths[0]), truths[0].aux(LAYERS))


@pytest.mark.parametrize("layers", [LAYERS, (LAST,)])
def test_nemo_takes_it_after_the_norm_for_dspark(dataset, truths, tmp_path, layers):
    export(str(dataset), tmp_path / "out", wanted("nemo", layers=layers))
    shard = load_file(tmp_path / "out/shard-000000.safetensors")
    for number, truth in enumerate(truths[:3]):
        length = len(truth.ids)
        got_TA = shard["target_hidden_states"][number, :length]
        assert torch.equal(got_TA[:, :-HIDDEN], truth.aux(layers)[:, :-HIDDEN])
        assert torch.equal(got_TA[:, -HIDDEN:], shard["target_last_hidden_states"][number, :length])
        assert close(got_TA[:, -HIDDEN:], truth.post())


@pytest.mark.parametrize("to", ["modelopt", "angelslim"])
def test_where_what_a_trainer_takes_is_not_known_it_is_refused(dataset, tmp_path, to):
    with pytest.raises(OptionRefused, match=f"{to} takes the last layer, {LAST}, after the") as refused:
        export(str(dataset), tmp_path / "out", wanted(to, layers=LAYERS))
    assert refused.value.field == "layers"
    assert f"leave {LAST} out of --layers" in str(refused.value.cure)
    assert not (tmp_path / "out").exists()
