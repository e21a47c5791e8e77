"""One thread calls each function of MKL's vector math first, wherever states are computed or proven."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from connector.vector_math import FUNCTIONS, settle_vector_math
from service.errors import EngineRefused
from service.proof import reference_process
from service.proof.head import Head

# The first call of each function in a process that does nothing but `{act}`.
FIRST_CALLS = """
import torch
from connector.vector_math import FUNCTIONS
from tests.unit.connector.test_vector_math import Sizes

with Sizes() as seen:
    {act}
first = {{}}
for name, dtype, count in seen.calls:
    first.setdefault((name, dtype), count)
for dtype in torch.float32, torch.float64:
    for name in FUNCTIONS:
        assert first[name, dtype] == 1, (name, dtype)
"""

# The fault needs a bad instant; where it strikes, half of this table is 1e-4 off.
ROTARY = """
    from connector.plugin import prepare
    prepare()
    angles = torch.outer(torch.arange(8192.0), 10_000.0 ** (-torch.arange(0.0, 1.0, 1 / 64)))
    for function in (torch.sin, torch.cos):
        assert torch.allclose(function(angles).double(), function(angles.double()), rtol=0, atol=1e-7)
"""


class Sizes(TorchDispatchMode):
    """How many values each call of a function was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.calls.append((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


ONE_VALUE_EACH = {(name, dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}


def test_it_is_done_once_a_process():
    settle_vector_math()
    with Sizes() as seen:
        settle_vector_math()
    assert seen.calls == []


@pytest.mark.engine
def test_an_engine_process_settles_before_it_computes_a_table_which_is_accurate():
    subprocess.run([sys.executable, "-c", FIRST_CALLS.format(act=ROTARY)], check=True)


def begin_a_reference() -> None:
    with pytest.raises(json.JSONDecodeError):
        reference_process.main()


def load_a_head() -> None:
    with pytest.raises(EngineRefused):
        Head.load(Path("nowhere"), "float32")


@pytest.mark.parametrize("begin", [begin_a_reference, load_a_head])
def test_the_service_settles_before_it_proves(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None]):
    """An order that is no JSON, and a folder that is not there: it settles before it reads either."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("no order"))
    settle_vector_math.cache_clear()
    with Sizes() as seen:
        begin()
    assert set(seen.calls) >= ONE_VALUE_EACH
