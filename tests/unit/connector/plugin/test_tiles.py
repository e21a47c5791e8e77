"""After the plug-in was loaded, a process may use the CPU's tile registers."""

import subprocess
import sys

import pytest
import torch

ASK = """
import ctypes
from connector.plugin import prepare

def may_use_tiles():
    mask = ctypes.c_ulong()
    SYS_arch_prctl, ARCH_GET_XCOMP_PERM, XTILEDATA = 158, 0x1022, 18
    assert ctypes.CDLL(None).syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, ctypes.byref(mask)) == 0
    return bool(mask.value >> XTILEDATA & 1)

assert not may_use_tiles()
prepare()
assert may_use_tiles()
"""


@pytest.mark.engine
@pytest.mark.outside
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the CPU has no tiles")
def test_the_plugin_asks_for_the_tiles_before_the_engine_takes_them():
    subprocess.run([sys.executable, "-c", ASK], check=True)
