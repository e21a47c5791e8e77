"""The writers may run beside the model, wherever the engine has bound their starter, and have their names."""

import os
import threading
from pathlib import Path

from connector.pool import HostPool
from connector.repeats import RepeatCheck
from connector.writers import WriterPool
from tests.support.plans import identity, order


def writers_of_a_bound_thread(work_root, tell):
    """Start writers as the engine's worker does, from a thread bound to one core; have each say something.

    Neither finds the plan that it is asked for, and each says so on its own thread.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    writers = WriterPool(
        num_threads=2,
        work_root=work_root,
        rank=0,
        num_ranks=1,
        pool=HostPool(4096, pinned=False),
        send=tell,
        repeats=RepeatCheck(1, 16),
    )
    for unit in range(2):
        about = order(identity(), 1, unit=unit)
        writers.put(about.key, about)
    writers.stop()


def test_writers_of_a_bound_thread_may_run_on_every_core_of_the_process(tmp_path):
    found = {}

    def tell(message):
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
        found[comm] = os.sched_getaffinity(0)

    bound = threading.Thread(target=writers_of_a_bound_thread, args=(tmp_path, tell))
    bound.start()
    bound.join()
    due = os.sched_getaffinity(os.getppid())
    assert found == {"quarry-writer-0": due, "quarry-writer-1": due}
