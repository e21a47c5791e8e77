"""Our connector, with a record of when the engine's worker computes and of what our checks cost it.

vLLM loads it by this module's name. A line a call goes to the file that `QUARRY_JOB_FILE` names: what was
called, when it began and ended (seconds of `time.monotonic`), how many tokens the step has, and the core
seconds of a check.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from connector import gather
from connector.hidden_states import HiddenStatesConnector as OurConnector
from connector.repeats import RepeatCheck
from connector.rowcheck import RowChecker
from connector.sentinels import Sentinels

FILE = "QUARRY_JOB_FILE"
Write = Callable[[str], Any]
Act = Callable[..., Any]


class HiddenStatesConnector(OurConnector):
    """Ours; begins the record in the worker's process."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin with the first step, which comes after this."""
        super().register_kv_caches(kv_caches)
        # A line at a time, so that nothing is lost when vLLM ends the process.
        write = Path(os.environ[FILE]).open("a", buffering=1).write  # noqa: SIM115 - open to the end
        # CPUWorker inherits both.
        for name in ("execute_model", "sample_tokens"):
            setattr(Worker, name, _step(name, getattr(Worker, name), write))
        all_threads = torch.get_num_threads()
        for owner, name, threads in (
            (gather, "add_up", 0),
            (RowChecker, "look", 0),
            (RowChecker, "check", 0),
            (RepeatCheck, "check", 0),
            (Sentinels, "place", all_threads),
            (Sampler, "compute_logprobs", all_threads),
            (Sampler, "gather_logprobs", all_threads),
        ):
            act = costed(f"{owner.__name__}.{name}", getattr(owner, name), write, threads=threads)
            setattr(owner, name, staticmethod(act) if owner is Sampler else act)


def costed(name: str, act: Act, write: Write, *, threads: int = 0) -> Act:
    """Return `act`, recording its core seconds; `threads` of torch's count as busy from its begin to its end.

    Without any it is the CPU time of the calling thread.
    """

    @functools.wraps(act)
    def recorded(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever it takes
        begin, cpu = time.monotonic(), time.thread_time()
        try:
            return act(*given, **named)
        finally:
            end = time.monotonic()
            cost = (end - begin) * threads if threads else time.thread_time() - cpu
            write(f"{name} {begin} {end} 0 {cost}\n")

    return recorded


def _step(name: str, act: Act, write: Write) -> Act:
    @functools.wraps(act)
    def recorded(self: Any, step: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - vLLM's
        begin = time.monotonic()
        try:
            return act(self, step, *rest, **named)
        finally:
            tokens = getattr(step, "total_num_scheduled_tokens", 0)
            write(f"{name} {begin} {time.monotonic()} {tokens} 0\n")

    return recorded
