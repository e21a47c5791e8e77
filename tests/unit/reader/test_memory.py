"""Memory that nobody holds is lent again, is never lent twice, and is kept within its bound."""

import gc
import mmap
import os
import threading

import pytest
import torch

from service.reader.memory import BLOCK_BYTES, Pool


def test_memory_is_lent_again_when_the_last_tensor_over_it_is_gone():
    pool = Pool()
    tensor = pool.lend(3 * BLOCK_BYTES)
    address, part = tensor.data_ptr(), tensor.view(torch.bfloat16)[5:9]
    del tensor
    assert pool.idle_bytes == 0
    del part
    assert pool.idle_bytes == 3 * BLOCK_BYTES
    assert pool.lend(2 * BLOCK_BYTES + 1).data_ptr() == address


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 10 * BLOCK_BYTES])
def test_a_tensor_is_as_long_as_was_asked_for_and_can_be_written_to(num_bytes):
    tensor = Pool().lend(num_bytes)
    assert tensor.shape == (num_bytes,)
    assert tensor.untyped_storage().nbytes() == num_bytes
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * num_bytes
    if num_bytes >= BLOCK_BYTES:
        assert tensor.data_ptr() % mmap.PAGESIZE == 0


def test_the_smallest_block_that_fits_is_lent_and_none_of_twice_the_size():
    pool = Pool()
    held = {size: pool.lend(size * BLOCK_BYTES) for size in (12, 5, 4)}
    addresses = {tensor.data_ptr(): size for size, tensor in held.items()}
    held.clear()
    four = pool.lend(4 * BLOCK_BYTES)
    assert addresses.pop(four.data_ptr()) == 4
    again = pool.lend(4 * BLOCK_BYTES)
    assert addresses.pop(again.data_ptr()) == 5
    fresh = pool.lend(4 * BLOCK_BYTES)
    assert fresh.data_ptr() not in addresses
    assert pool.idle_bytes == 12 * BLOCK_BYTES


def test_no_more_is_kept_than_was_said():
    pool = Pool(idle_bytes=5 * BLOCK_BYTES)
    held = [pool.lend(2 * BLOCK_BYTES) for _ in range(4)]
    held.clear()
    assert pool.idle_bytes == 4 * BLOCK_BYTES
    large = pool.lend(9 * BLOCK_BYTES)
    del large
    assert pool.idle_bytes == 0


def test_threads_never_hold_the_same_memory():
    """Each of 4 threads writes its number into what it is lent, and finds it there 200 times."""
    pool, wrong = Pool(8 * BLOCK_BYTES), []

    def use(number: int) -> None:
        for turn in range(200):
            tensor = pool.lend(BLOCK_BYTES + turn % 3 * BLOCK_BYTES)
            tensor[::4096] = number
            if int(tensor[::4096].min()) != number or int(tensor[::4096].max()) != number:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.idle_bytes <= 8 * BLOCK_BYTES


def test_memory_held_in_a_cycle_comes_back_with_it():
    pool = Pool()
    cycle: list[object] = [pool.lend(BLOCK_BYTES)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.idle_bytes == BLOCK_BYTES


def test_a_forked_process_writes_to_memory_of_its_own():
    pool = Pool()
    mine, idle = pool.lend(BLOCK_BYTES), pool.lend(BLOCK_BYTES)
    mine[0], idle[0] = 1, 2
    address = idle.data_ptr()
    del idle
    child = os.fork()
    if not child:
        # One element at a time: torch's threads are not there in a forked process.
        lent = pool.lend(BLOCK_BYTES)
        mine[0] = lent[0] = 9
        os._exit(0 if lent.data_ptr() == address else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(mine[0]) == 1
    assert int(pool.lend(BLOCK_BYTES)[0]) == 2
