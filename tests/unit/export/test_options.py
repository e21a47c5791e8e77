"""What the command line may ask for."""

import pytest

from service.errors import OptionRefused
from service.export.options import Algorithm, FormatName, chosen_algorithm, parsed_layers


def test_layers_are_taken_in_ascending_order():
    assert parsed_layers("29, 2,16") == (2, 16, 29)
    assert parsed_layers(None) is None


@pytest.mark.parametrize(("text", "words"), [("2,x", "not a list"), ("", "not a list"), ("2,2", "twice")])
def test_layers_that_are_no_ids_are_refused(text, words):
    with pytest.raises(OptionRefused, match=words) as refused:
        parsed_layers(text)
    assert refused.value.field == "layers"
    assert "2,16,29" in str(refused.value.cure)


def test_a_trainer_has_a_usual_algorithm():
    assert chosen_algorithm(FormatName.NEMO, None) is Algorithm.DSPARK
    assert chosen_algorithm(FormatName.SPECULATORS, Algorithm.MTP) is Algorithm.MTP


def test_an_algorithm_that_a_trainer_lacks_is_refused():
    with pytest.raises(OptionRefused, match="export to eagle cannot be written for mtp") as refused:
        chosen_algorithm(FormatName.EAGLE, Algorithm.MTP)
    assert (refused.value.field, refused.value.cure) == ("algorithm", "name one of eagle")
