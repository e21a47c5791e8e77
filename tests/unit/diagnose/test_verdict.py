"""What is said of what was measured: no right drafter is accused, each wrong one is named for one thing."""

import pytest

from service.diagnose.acceptance import Length
from service.diagnose.diagnosis import Data, Diagnosis
from service.diagnose.tried import AS_IT_IS, Search, Tried
from service.diagnose.verdict import findings, lines


def tried(name, length, sampled, effect="worse", cure=""):
    """The sampled figure is of a base of 1 accepted token; the greedy length is as given."""
    gain = sampled - 1.0
    return Tried(name, cure, length, 1.1, 1 + sampled, gain, gain - 0.01, gain + 0.01, effect)


def diagnosis(*, own=1.8, states=1.2, tokens=1.2, first=0.6, odds=0.1, causes=(), learnt=(), untrained=False):
    probes = [
        tried(AS_IT_IS.name, own, 1.0, "no difference"),
        tried("states of another row", states, (states - 1) / max(own - 1, 1e-9)),
        tried("tokens of another row", tokens, (tokens - 1) / max(own - 1, 1e-9)),
    ]
    length = Length(own, own - 0.1, own + 0.1, 100)
    return Diagnosis(
        drafter="drafter",
        dataset="dataset",
        form="EAGLE-3",
        layers=(2, 4, 5),
        drafted=3,
        played=True,
        length=length,
        untrained=untrained,
        first_right=first,
        first_odds=odds,
        by_step=[first, 0.2, 0.1],
        groups={"by position in the answer, from": {"0": length}},
        search=Search([*probes, *causes], list(learnt), list(causes), [6]),
        data=Data(10, 1000, 0.5, 1.0, 1.0, 0.5, True),
        worst=[],
    )


LINE = '"eagle_aux_hidden_state_layer_ids": '


def said(**measured):
    return [one.what for one in findings(diagnosis(**measured))]


def test_a_right_drafter_is_not_accused():
    assert said() == []
    assert "nothing wrong was found" in "\n".join(lines(diagnosis()))


def test_a_weaker_one_that_uses_what_it_is_fed_is_not_accused():
    assert said(own=1.5, first=0.45, states=1.3, tokens=1.2) == []


def test_one_that_no_training_changed_is_called_that_however_sure_it_is_of_itself():
    measured = {"own": 1.01, "first": 0.005, "odds": 0.16, "states": 1.0, "tokens": 1.0}
    (what,) = said(**measured, untrained=True)
    assert "undertrained: no training changed its norms" in what
    (what,) = said(**measured)
    assert "not what was trained" in what


HELP = tried("states after the final norm", 1.02, 1.07, "better", "train on what vLLM feeds")


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"own": 1.01, "first": 0.01, "states": 1.0, "tokens": 1.0, "causes": [HELP]}, "undertrained"),
        ({"own": 1.01, "first": 0.01, "odds": 0.7, "states": 1.0, "tokens": 1.0}, "not what was trained"),
        ({"own": 1.5, "first": 0.44, "states": 1.49, "tokens": 1.1}, "undertrained"),
        ({"own": 1.6, "first": 0.55, "states": 1.59, "tokens": 1.1}, "does not use the states"),
        ({"own": 1.4, "first": 0.3, "states": 1.1, "tokens": 1.4}, "of other rows than its tokens"),
    ],
    ids=["knows nothing", "sure of what is wrong", "what is frequent", "without states", "without tokens"],
)
def test_a_wrong_drafter_is_named_for_one_thing(measured, says):
    (what,) = said(**measured)
    assert says in what


def test_steps_to_the_right_layers_are_one_finding_with_the_last_line():
    causes = [
        tried("layer 3 one lower: [2, 5, 7]", 1.8, 1.1, "better", f"{LINE}[2, 5, 7]"),
        tried("layer 5 one lower: [2, 4, 5]", 1.8, 1.1, "better", f"{LINE}[2, 4, 5]"),
    ]
    assert [one.cure for one in findings(diagnosis(causes=causes))] == [f"{LINE}[2, 4, 5]"]


def test_another_target_is_named_beside_another_input():
    causes = [tried("every layer one lower: [1, 3, 4]", 1.8, 1.1, "better", f"{LINE}[1, 3, 4]")]
    learnt = [
        tried("no final norm", 1.1, 0.5, "worse", "give it the norm"),
        tried("the layer below the last", 1.9, 1.2, "better", "take the last layer by vLLM's id"),
    ]
    cures = [one.cure for one in findings(diagnosis(causes=causes, learnt=learnt))]
    assert cures == [f"{LINE}[1, 3, 4]", "take the last layer by vLLM's id"]


def test_layers_that_could_not_be_tried_are_asked_for():
    text = "\n".join(lines(diagnosis()))
    assert "layers 6" in text
    assert '"layers": [2, 4, 5, 6]' in text
