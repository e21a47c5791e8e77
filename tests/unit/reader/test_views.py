"""Views of a row whose every value is known: what is fed, what is due, and where it counts."""

import pytest
import torch

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm
from service.reader.about import About
from service.reader.errors import ReaderError
from service.reader.row import Row
from service.reader.views import IGNORED, DFlash, Eagle, Eagle3, Mtp, PEagle, Step35Mtp

HIDDEN = 4
IDS = [10, 11, 12, 13, 14, 15]
MASK = [0, 0, 1, 1, 1, 0]
TWICE = NormWeights(FinalNorm(kind="rmsnorm", eps=0.0), torch.full((HIDDEN,), 2.0), None)


def states(layer_id: int, num_tokens: int = len(IDS)) -> torch.Tensor:
    """Position t of layer k holds 100 * k + t in every element but the sign of the last."""
    values = torch.arange(1, num_tokens + 1, dtype=torch.float32)[:, None] + 100.0 * layer_id
    return values.expand(-1, HIDDEN) * torch.tensor([1.0, 1.0, 1.0, -1.0])


def row(num_tokens: int = len(IDS), reads: list[int] | None = None) -> Row:
    def read(layer_id: int) -> torch.Tensor:
        if reads is not None:
            reads.append(layer_id)
        return states(layer_id, num_tokens)

    return Row(
        sample_id="s",
        source_id=None,
        prompt_tokens=2,
        input_ids=torch.tensor(IDS[:num_tokens]),
        loss_mask=torch.tensor(MASK[:num_tokens], dtype=torch.uint8),
        layer_ids=(2, 4, 8),
        num_layers=8,
        read=read,
        norm=TWICE,
    )


def about(*layer_ids: int) -> About:
    return About("m", "r", 8, layer_ids, HIDDEN, torch.bfloat16, "none", FinalNorm(kind="rmsnorm", eps=1e-6))


def test_eagle_is_fed_the_next_token_beside_the_post_norm_state() -> None:
    view = Eagle()(row())
    assert view["input_ids"].tolist() == IDS[1:]
    assert view["positions"].tolist() == [0, 1, 2, 3, 4]
    assert view["labels"].tolist() == [12, 13, 14, 15, IGNORED]
    # Every state has the root mean square of its own magnitude, so its norm is 2 with the state's signs.
    assert torch.allclose(view["hidden_states"], torch.tensor([2.0, 2.0, 2.0, -2.0]).expand(5, -1))
    assert view["target_hidden_states"].shape == (5, HIDDEN)


def test_a_row_counts_where_its_token_and_the_predicted_one_are_supervised() -> None:
    # Token t + 1 is fed, t + 2 is due: 12 -> 13 and 13 -> 14. Before 12 no drafter runs; after 14 the answer
    # is over.
    assert Eagle()(row())["loss_mask"].tolist() == [0, 1, 1, 0, 0]


def test_eagle3_lays_auxiliary_layers_side_by_side_in_ascending_order() -> None:
    reads: list[int] = []
    view = Eagle3()(row(reads=reads))
    assert torch.equal(view["hidden_states"], torch.cat([states(2), states(4)], dim=-1)[:-1])
    assert sorted(reads) == [2, 4, 8]
    chosen = Eagle3(layers=(8, 2))(row())
    assert torch.equal(chosen["hidden_states"], torch.cat([states(2), states(8)], dim=-1)[:-1])


def test_the_target_state_is_the_one_that_predicts_the_label() -> None:
    plain = NormWeights(FinalNorm(kind="rmsnorm", eps=0.0), torch.ones(HIDDEN), None)
    of_row = row()
    view = Eagle3()(of_row)
    assert torch.equal(view["target_hidden_states"], TWICE(states(8))[1:])
    assert not torch.equal(view["target_hidden_states"], plain(states(8))[1:])


def test_parallel_steps_have_labels_of_their_own_and_the_first_steps_inputs() -> None:
    view = PEagle(num_steps=3)(row())
    assert view["input_ids"].tolist() == IDS[1:]
    assert view["labels"].tolist() == [
        [12, 13, 14, 15, IGNORED],
        [13, 14, 15, IGNORED, IGNORED],
        [14, 15, IGNORED, IGNORED, IGNORED],
    ]
    assert view["loss_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_mtp_feeds_each_step_the_token_before_the_one_it_predicts() -> None:
    view = Mtp(num_steps=2)(row())
    assert view["input_ids"].tolist() == [[11, 12, 13, 14, 15], [12, 13, 14, 15, 0]]
    assert view["labels"].tolist() == [[12, 13, 14, 15, IGNORED], [13, 14, 15, IGNORED, IGNORED]]
    assert torch.equal(view["hidden_states"], TWICE(states(8))[:-1])


@pytest.mark.parametrize("view", [PEagle(3), Mtp(3), Step35Mtp(3)])
def test_every_draft_step_stands_one_position_further(view) -> None:
    # As in serving, where step k of the draft behind position t is fed at position t + k.
    assert view(row())["positions"].tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]


def test_mtp_is_fed_the_state_before_the_final_norm_where_the_target_hands_that_over() -> None:
    view = Mtp(num_steps=2, normed=False)(row())
    assert torch.equal(view["hidden_states"], states(8)[:-1])
    assert torch.equal(view["target_hidden_states"], TWICE(states(8))[1:])


def test_step35_is_fed_the_state_before_the_final_norm() -> None:
    view = Step35Mtp(num_steps=2)(row())
    assert torch.equal(view["hidden_states"], states(8)[:-1])
    assert torch.equal(view["target_hidden_states"], TWICE(states(8))[1:])


def test_dflash_is_not_shifted() -> None:
    view = DFlash()(row())
    assert view["input_ids"].tolist() == IDS
    assert view["loss_mask"].tolist() == MASK
    assert view["labels"].tolist() == [*IDS[1:], IGNORED]
    assert torch.equal(view["hidden_states"], torch.cat([states(2), states(4)], dim=-1))


@pytest.mark.parametrize("view", [Eagle(), Eagle3(), PEagle(2), Mtp(2), Step35Mtp(2)])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_short_rows_give_short_views(view, num_tokens) -> None:
    made = view(row(num_tokens))
    assert made["hidden_states"].shape[0] == made["positions"].shape[-1] == num_tokens - 1
    assert made["labels"].shape[-1] == num_tokens - 1
    assert not made["loss_mask"].any()


@pytest.mark.parametrize(
    ("view", "layer_ids", "told"),
    [
        (Eagle(), (2, 4), r"holds layers \[2, 4\]; this view needs \[8\]"),
        (Eagle3(), (8,), "no auxiliary layers"),
        (Eagle3(layers=(3, 4)), (2, 4, 8), r"needs \[3\]"),
        (Eagle3(layers=()), (2, 4, 8), "names no layer"),
        (PEagle(0), (2, 8), "'num_steps' is 0"),
        (Mtp(1), (2, 4), r"needs \[8\]"),
        (DFlash(), (8,), "no auxiliary layers"),
    ],
)
def test_a_view_that_cannot_be_served_is_refused_with_the_cure(view, layer_ids, told) -> None:
    with pytest.raises(ReaderError, match=told):
        view.check(about(*layer_ids))
