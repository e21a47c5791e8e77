"""The worker half before a step: what the cache holds when the engine computes into it."""

import socket
import threading
from pathlib import Path

import torch

from connector.wire import DrainConfig, StepWork
from connector.worker import WorkerHalf

B, L, S, H = 4, 2, 4, 16


def test_what_a_steps_padding_left_in_block_0_is_zero_before_the_next_step(tmp_path: Path) -> None:
    """The caches of all groups share it, and attention behind a window multiplies what it holds by zero."""
    cache = torch.ones(B, L, S, H, dtype=torch.bfloat16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        config = DrainConfig(tmp_path, tmp_path / "s", 2**20, 1, rank=0, num_ranks=1, engine_version="0")
        half = WorkerHalf(config, cache, max_tokens=8, on_lost=threading.Event().set)
        service, _ = listening.accept()
        with service:
            cache[0, :, 0] = float("nan")
            half.begin(StepWork(fresh=[2]))
            half.stop()
    assert not cache[0].any()
    assert (cache[[1, 3]] == 1).all()
