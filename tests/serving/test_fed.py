"""Sorting a recording by request, on passes written by hand."""

from typing import Any

import torch

from tests.serving.fed import by_request


def states(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None].expand(-1, 2)


def one_by_one() -> dict[str, Any]:
    """Two requests: the first has three rows, the last of a rejected token; the other's prompt goes on."""
    return {
        "requests": ["1-abc", "0-def"],
        "partial": [False, True],
        "target_states": states(0.0, 1.0, 2.0, 3.0, 4.0),
        "target_starts": torch.tensor([0, 3, 5]),
        "rejected": torch.tensor([1, 0]),
        "starts": torch.tensor([0, 3, 5]),
        "samples": torch.tensor([1, 4]),
        "calls": [
            {
                "input_ids": torch.tensor([11, 12, 13, 21, 22]),
                "positions": torch.tensor([5, 6, 7, 0, 1]),
                "hidden_states": states(0.5, 1.5, 2.5, 3.5, 4.5),
            },
            {
                "input_ids": torch.tensor([14, 24]),
                "positions": torch.tensor([7, 2]),
                "hidden_states": states(7.0, 8.0),
                "spec_step_idx": 1,
            },
        ],
    }


def parallel() -> dict[str, Any]:
    """The same with a slot behind each request's rows that holds no token yet."""
    first = {
        "input_ids": torch.tensor([11, 12, 99, 0, 21, 22, 99]),
        "positions": torch.tensor([5, 6, 7, 0, 0, 1, 2]),
        "hidden_states": states(0.5, 1.5, 9.0, 0.0, 3.5, 4.5, 9.0),
    }
    return one_by_one() | {
        "starts": torch.tensor([0, 4, 7]),
        "samples": torch.tensor([1, 2, 5, 6]),
        "calls": [first],
    }


def test_rows_of_rejected_tokens_are_left_out() -> None:
    for one in (one_by_one(), parallel()):
        fed = by_request([one])
        assert (fed[1].ids_R, fed[1].positions_R) == ([11, 12], [5, 6])
        assert (fed[0].ids_R, fed[0].positions_R) == ([21, 22], [0, 1])
        assert fed[1].states_RX[:, 0].tolist() == [0.0, 1.0]
        assert fed[1].states_RH[:, 0].tolist() == [0.5, 1.5]
        assert fed[0].states_RX[:, 0].tolist() == [3.0, 4.0]
        assert fed[0].states_RH[:, 0].tolist() == [3.5, 4.5]


def test_later_steps_belong_to_the_row_behind_which_they_draft() -> None:
    fed = by_request([one_by_one()])
    (later,) = fed[1].later
    assert (later.row, later.step, later.input_id, later.position, later.layer) == (6, 1, 14, 7, 1)
    (later,) = by_request([parallel()])[1].later
    assert (later.row, later.step, later.input_id, later.position, later.layer) == (6, 1, 99, 7, None)
    assert later.state_H is not None
    assert later.state_H.tolist() == [9.0, 9.0]


def test_passes_of_one_request_are_put_one_behind_the_other() -> None:
    second = one_by_one()
    second["partial"] = [False, False]
    second["calls"][0]["positions"] = torch.tensor([7, 8, 9, 2, 3])
    fed = by_request([one_by_one(), second])
    assert fed[0].positions_R == [0, 1, 2, 3]
    assert (fed[0].chunk_ends, fed[0].drafts) == ([1], 1)
    assert (fed[1].positions_R, fed[1].drafts) == ([5, 6, 7, 8], 2)
    # Two rows in the second pass: its own, and that of a draft which the target kept.
    assert fed[1].accepted(prompt_tokens=2) == 1


def test_dflash_has_its_context_apart_and_an_anchor_behind_it() -> None:
    one = one_by_one() | {
        "context": {"positions": torch.tensor([5, 6, 7, 0, 1]), "states": states(0.5, 1.5, 2.5, 3.5, 4.5)},
        "starts": torch.tensor([0, 3, 6]),
        "samples": torch.tensor([1, 2, 4, 5]),
        "calls": [
            {
                "input_ids": torch.tensor([12, 99, 99, 23, 99, 99]),
                "positions": torch.tensor([7, 8, 9, 2, 3, 4]),
            }
        ],
    }
    fed = by_request([one])
    assert (fed[1].ids_R, fed[1].positions_R, fed[1].anchors) == ([], [5, 6], {6: (12, 7)})
    assert fed[0].states_RH[:, 0].tolist() == [3.5, 4.5]
    assert [(later.step, later.position) for later in fed[0].later] == [(1, 3), (2, 4)]
