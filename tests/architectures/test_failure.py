"""Who ended a job, and why, as the table tells it."""

import pytest

from service.errors import EngineDied, EngineRefused, StatesWrong, UnknownModel
from tests.architectures.failure import refuser, root_cause
from tests.architectures.results import Verdict

LOG = """\
(Worker pid=1) INFO 11-20 14:06:33 [kernel.py:467] ValueError is not raised here
(Worker pid=1) ERROR 11-20 14:06:33 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=1) ERROR 11-20 14:06:33 [multiproc_executor.py:1063]     precopy[grid](
(Worker pid=1) ERROR 11-20 14:06:33 [multiproc_executor.py:1063]     ~~~~~~~^^^^^^
(Worker pid=1) ERROR 11-20 14:06:33 [multiproc_executor.py:1063] {raised}
(EngineCore pid=2) RuntimeError: Worker failed with error 'x', please check the stack trace above
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (
            "TypeError: 'function' object is not subscriptable",
            "TypeError: 'function' object is not subscriptable",
        ),
        ("torch.AcceleratorError: no device", "torch.AcceleratorError: no device"),
        ("AssertionError", "AssertionError: precopy[grid]("),
    ],
)
def test_the_cause_is_the_first_exception_and_not_the_news_of_it(raised, cause):
    assert root_cause(LOG.format(raised=raised)) == cause


def test_a_log_without_an_exception_has_no_cause():
    assert root_cause("INFO all is well\nError rate: 0") is None


@pytest.mark.parametrize(
    ("error", "by", "verdict"),
    [
        (EngineDied("the core died"), "the engine", Verdict.CANNOT_RUN),
        (StatesWrong("canary: layer 2 looks like layer 1"), "the canary", Verdict.REFUSED),
        (StatesWrong("row 3: not finite"), "the row checks", Verdict.REFUSED),
        (EngineRefused("no class can return hidden states"), "Quarry", Verdict.REFUSED),
        (EngineRefused("vLLM refuses m: AttributeError: no heads"), "the engine", Verdict.CANNOT_RUN),
        (UnknownModel("no config.json"), "unknown-model", Verdict.REFUSED),
    ],
)
def test_a_death_of_the_engine_is_told_from_a_refusal(error, by, verdict):
    assert refuser(error.problem()) == (by, verdict)
