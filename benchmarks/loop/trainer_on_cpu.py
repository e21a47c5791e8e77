"""`speculators` on a machine without an accelerator: its own command line, with the CPU as its device.

`python -m benchmarks.loop.trainer_on_cpu train ...` in a process that has the trainer's packages on its path,
or `... quarry train speculators ...`.
The trainer moves models and batches to `get_local_rank()`, a number that torch reads as a CUDA device, and
waits for the accelerator around every timed step; nothing else of it is touched.
"""

import sys
from importlib import import_module

import torch


def on_cpu() -> None:
    """Answer the trainer's questions after an accelerator."""
    trainer = import_module("speculators.train.trainer")
    trainer.__dict__["get_local_rank"] = lambda: torch.device("cpu")
    checkpointer = import_module("speculators.train.checkpointer")
    checkpointer.__dict__["get_current_device"] = lambda: "cpu"
    torch.accelerator.__dict__["synchronize"] = lambda device=None: None


if __name__ == "__main__":
    if is_ours := sys.argv[1] == "quarry":
        import_module("service.trainers.speculators")  # before speculators' own configuration
    on_cpu()
    if is_ours:
        import_module("service.cli").main(sys.argv[2:])
    else:
        import_module("speculators.cli").app()
