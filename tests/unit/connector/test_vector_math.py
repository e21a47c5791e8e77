"""One thread calls each function of MKL's vector math first, wherever states are computed or proven."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from connector.vector_math import FUNCTIONS, settle_vector_math

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
    from connector.plugin import register
    register()
    angles = torch.outer(torch.arange(8192.0), 10_000.0 ** (-torch.arange(0.0, 1.0, 1 / 64)))
    for function in (torch.sin, torch.cos):
        assert torch.allclose(function(angles).double(), function(angles.double()), rtol=0, atol=1e-7)
"""
REFERENCE = """
    import io, json, sys
    from service.proof import reference_process
    sys.stdin = io.StringIO(json.dumps(dict(folder="nowhere", prompts=[], dtype="float32")))
    reference_process.main()
"""
HEAD = """
    from pathlib import Path
    from service.errors import EngineRefused
    from service.proof.head import Head
    try:
        Head.load(Path("nowhere"), "float32")
    except EngineRefused:
        pass
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


def test_every_function_is_called_on_one_value_in_both_dtypes():
    settle_vector_math.cache_clear()
    with Sizes() as seen:
        settle_vector_math()
    wanted = {(name, dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert wanted <= set(seen.calls)


def test_it_is_done_once_a_process():
    settle_vector_math()
    with Sizes() as seen:
        settle_vector_math()
    assert seen.calls == []


@pytest.mark.engine
def test_an_engine_process_settles_before_it_computes_a_table_which_is_accurate():
    subprocess.run([sys.executable, "-c", FIRST_CALLS.format(act=ROTARY)], check=True)


@pytest.mark.parametrize("act", [REFERENCE, HEAD], ids=["reference", "head"])
def test_the_service_settles_before_it_proves(act):
    subprocess.run([sys.executable, "-c", FIRST_CALLS.format(act=act)], check=True)
