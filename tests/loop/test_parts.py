"""The loop's questions, stages, figures and judgement; no engine."""

from pathlib import Path

import pytest
import torch

from benchmarks.loop.datasets import HEAD, NORM, unevenly_normed
from benchmarks.loop.drafters import command, outcome as outcome_of
from benchmarks.loop.recipe import EAGLE3, PEAGLE, LoopRecipe, split
from benchmarks.loop.serve import Acceptance
from benchmarks.loop.stage import Cache, LoopFailed, python, run
from benchmarks.loop.states import relative_errors
from benchmarks.loop.table import (
    FEWER,
    FP8,
    IN_PLACE,
    LIVE,
    OURS,
    PEER,
    ROWS,
    UNTRAINED,
    WRONG,
    Outcome,
    acceptance_table,
    judged,
)

SLACK = 0.1


def outcome(length: float, drafts: int = 1000) -> Outcome:
    """Return an outcome of two seeds that both have this mean length."""
    accepted = round((length - 1) * drafts)
    one = Acceptance(drafts, 3 * drafts, accepted, (accepted, 0, 0), 500)
    return Outcome((50, 51), {0: one, 1: one})


def outcomes(**lengths: float) -> dict[str, Outcome]:
    """Return outcomes as they should be, but for those named."""
    usual = dict.fromkeys((OURS, PEER, FP8, IN_PLACE, LIVE), 2.5) | dict.fromkeys((*WRONG, UNTRAINED), 1.5)
    return {name: outcome(length) for name, length in (usual | lengths).items()}


def test_the_mean_accepted_length_counts_the_targets_own_token():
    assert Acceptance(100, 300, 150, (80, 50, 20), 250).mean_length == 2.5
    assert outcome(2.0).mean_length == 2.0
    assert outcome(2.0).rates == [1.0, 0.0, 0.0]


def test_acceptance_as_it_should_be_is_not_complained_of():
    assert judged("EAGLE-3", outcomes(), SLACK) == []
    assert judged("EAGLE-3", outcomes(quarry=2.42), SLACK) == []
    assert judged("EAGLE-3", outcomes(quarry_fp8=2.42), SLACK) == []


@pytest.mark.parametrize(
    ("name", "length", "reason"),
    [
        (OURS, 2.35, "below the peer's"),
        (FP8, 2.35, "without loss"),
        *((name, 2.35, "below that of the export") for name in (IN_PLACE, LIVE)),
        *((name, 2.45, "not visibly below") for name in (*WRONG, UNTRAINED)),
    ],
)
def test_each_outcome_that_is_not_as_it_should_be_is_named(name, length, reason):
    (line,) = judged("EAGLE-3", outcomes(**{name: length}), SLACK)
    assert line.startswith(f"EAGLE-3, {name}") and reason in line


def test_every_row_has_a_line_in_the_table():
    lines = acceptance_table("EAGLE-3", outcomes()).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert all(any(label in line for line in lines) for label in ROWS.values())
    ours = next(line for line in lines if ROWS[OURS] in line)
    assert "2.500" in ours and "50..51" in ours


def test_seeds_that_took_other_steps_are_one_outcome():
    found = outcome_of({seed: (steps, outcome(2.0).by_seed[0]) for seed, steps in ((0, 151), (1, 150))})
    assert found.as_json()["steps"] == [151, 150]
    assert found.mean_length == 2.0


def test_a_method_of_fewer_rows_is_judged_by_those_it_has():
    fewer = {name: one for name, one in outcomes(layer_below=2.45).items() if name in FEWER}
    (said,) = judged("P-EAGLE", fewer, SLACK)
    assert said.startswith("P-EAGLE, layer_below")
    assert judged("P-EAGLE", fewer, 0.04) == []
    assert len(acceptance_table("P-EAGLE", fewer).splitlines()) == 2 + len(FEWER)


def test_each_method_tells_the_trainer_its_type_and_depth():
    recipe = LoopRecipe(drafted=3)
    told = {
        method.trainers: list(map(str, command(recipe, method, Path("t"), Path("d"), Path("o"), seed=0)))
        for method in (EAGLE3, PEAGLE)
    }
    for name, depth, other in (
        ("eagle3", "--ttt-steps", "--num-depths"),
        ("peagle", "--num-depths", "--ttt-steps"),
    ):
        assert told[name][told[name].index("--speculator-type") + 1] == name
        assert told[name][told[name].index(depth) + 1] == "3"
        assert other not in told[name]


def test_held_out_questions_are_never_trained_on():
    asked, held_out = split(100, 20)
    assert (len(set(asked)), len(set(held_out))) == (100, 20)
    assert not set(asked) & set(held_out)
    assert split(100, 20) == (asked, held_out)
    assert split(50, 20)[1] == held_out


def test_more_questions_than_there_are_is_refused():
    with pytest.raises(ValueError, match="there are"):
        split(10_000, 1)


def test_a_stage_is_made_once_and_again_when_what_decides_it_changes(tmp_path):
    made = []
    cache = Cache(tmp_path)

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("x")

    first = cache.stage("part", {"seed": 0}, make)
    assert cache.stage("part", {"seed": 0}, make) == first
    assert (first / "file").read_text() == "x"
    assert cache.stage("part", {"seed": 1}, make) != first
    assert len(made) == 2


def test_a_failed_stage_leaves_nothing_and_tells_the_end_of_its_log(tmp_path):
    def make(folder):
        run([*python("this"), "--no-such"], folder / "log.txt")
        run(python("no_such_module"), folder / "log.txt")

    with pytest.raises(LoopFailed, match="No module named no_such_module"):
        Cache(tmp_path / "cache").stage("part", {}, make)
    assert list((tmp_path / "cache").iterdir()) == []


def test_errors_are_relative_to_each_tokens_own_state():
    right_TH = torch.tensor([[3.0, 4.0], [0.0, 100.0]])
    found_TH = right_TH + torch.tensor([[0.0, 0.05], [1.0, 0.0]])
    errors_T = relative_errors(found_TH, right_TH)
    assert torch.allclose(errors_T, torch.tensor([0.01, 0.01], dtype=torch.float64))


def test_the_uneven_target_computes_the_same_and_minds_a_second_norm():
    draw = torch.Generator().manual_seed(1)
    plain = {NORM: torch.full((32,), 1.2), HEAD: torch.randn(50, 32, generator=draw)}
    uneven = unevenly_normed(plain, seed=0)
    states_TH = torch.randn(200, 32, generator=draw)

    def logits(weights, norms=1):
        normed_TH = states_TH
        for _ in range(norms):
            normed_TH = torch.nn.functional.rms_norm(normed_TH, (32,), weights[NORM])
        return normed_TH @ weights[HEAD].T

    def same_argmax(weights):
        return float((logits(weights).argmax(-1) == logits(weights, norms=2).argmax(-1)).float().mean())

    assert torch.allclose(logits(uneven), logits(plain), rtol=1e-4, atol=1e-4)
    assert same_argmax(plain) > 0.99
    assert same_argmax(uneven) < 0.9
