import gc
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from connector.pool import ALIGN_BYTES, HostPool


def test_a_slab_is_given_until_the_pool_is_full_and_again_after_a_release():
    pool = HostPool(3 * ALIGN_BYTES, pinned=False)
    first, second, third = (pool.acquire(ALIGN_BYTES) for _ in range(3))
    assert pool.acquire(1) is None
    assert first is not None and second is not None and third is not None
    pool.release(second)
    assert pool.acquire(2 * ALIGN_BYTES) is None
    pool.release(first)
    again = pool.acquire(2 * ALIGN_BYTES)
    assert again is not None and again.offset == 0


def test_a_slab_that_can_never_fit_is_an_error_and_not_an_endless_wait():
    with pytest.raises(ValueError, match="do not fit"):
        HostPool(ALIGN_BYTES, pinned=False).acquire(ALIGN_BYTES + 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * ALIGN_BYTES), st.integers(0, 7)), max_size=60))
def test_slabs_never_overlap_and_every_byte_comes_back(steps):
    pool = HostPool(16 * ALIGN_BYTES, pinned=False)
    held = []
    for num_bytes, release in steps:
        slab = pool.acquire(num_bytes)
        if slab is not None:
            held.append(slab)
        spans = sorted((one.offset, one.offset + one.reserved_bytes) for one in held)
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
        if release < len(held):
            pool.release(held.pop(release))
    for slab in held:
        pool.release(slab)
    assert pool.acquire(pool.num_bytes) is not None


def test_a_slabs_tensor_begins_on_a_page_border_and_outlives_the_pool():
    pool = HostPool(3 * ALIGN_BYTES, pinned=False)
    slabs = [pool.acquire(1), pool.acquire(24)]
    assert all(
        pool.tensor(slab, torch.uint8, (slab.num_bytes,)).data_ptr() % ALIGN_BYTES == 0 for slab in slabs
    )
    states = pool.tensor(slabs[1], torch.bfloat16, (3, 4)).fill_(1.5)
    assert pool.tensor(slabs[1], torch.bfloat16, (12,)).tolist() == [1.5] * 12
    del pool
    gc.collect()
    assert states.sum() == 18


def test_a_child_that_is_forked_gets_no_copy_of_the_pool():
    """A write to a page that both hold would move it away from under a device that copies into it."""
    pool = HostPool(64 * ALIGN_BYTES, pinned=False)
    slab = pool.acquire(1)
    address = pool.tensor(slab, torch.uint8, (1,)).data_ptr()
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]
    spans = [[int(end, 16) for end in area.split(maxsplit=1)[0].split("-")] for area in areas]
    (area,) = (area for area, (begin, end) in zip(areas, spans, strict=True) if begin <= address < end)
    assert " dc " in next(line for line in area.splitlines() if line.startswith("VmFlags:"))


def test_a_pool_that_the_machine_cannot_hold_is_refused_at_once():
    with pytest.raises(MemoryError, match="for the host pool"):
        HostPool(2**62, pinned=False)
