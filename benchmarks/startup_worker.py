"""Marks in vLLM's worker process, for any engine whose `worker_extension_cls` has vLLM import this there."""

import os

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.startup_marks import mark, mark_birth, marked

mark_birth("the engine's core process", os.getppid())
mark_birth("the engine's worker process")
mark("the engine's worker is imported")


class Marks:
    """Adds nothing to the worker; what is marked is wrapped when this module is imported."""


for name, stage in (
    ("load_model", "the model is loaded"),
    ("initialize_from_config", "the KV cache is ready"),
    ("compile_or_warm_up_model", "the engine is warm"),
):
    setattr(CPUWorker, name, marked(stage, getattr(CPUWorker, name)))
