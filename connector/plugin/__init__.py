"""Makes vLLM return hidden states where its own classes do not: entry point `vllm.general_plugins`.

It also works around three faults of vLLM: its CPU build uses tile registers without asking for them (`tiles`)
and first calls vector math from many threads at once (`connector.vector_math`), and its GPU kernels overwrite
the embeddings (`copies`). And it keeps the error of which a process dies (`failure`). vLLM calls `register`
in each of its processes, whoever started it, before a model exists. No file of vLLM is changed: our classes
are added to its registry, and one method of its models is replaced.
"""

import os
from pathlib import Path

from connector.plugin.carried import BACKEND, BACKEND_CLASSES, CARRIED, MODELS

CLASSES = "connector.plugin.classes"


CAPTURES = "QUARRY_ENGINE_PROCESS"
"""Set by the service and inherited by its engine's processes."""
FAILURE = "QUARRY_ENGINE_FAILURE"
"""Likewise: the file in which they keep the error of which one of them dies."""


def register() -> None:
    """Prepare a process of the service's own engine; leave any other process alone."""
    if CAPTURES in os.environ:
        prepare()


def prepare() -> None:
    """Apply the workarounds, and register our class for each architecture we carry; vLLM loads it lazily."""
    from vllm import ModelRegistry

    from connector.plugin.copies import copy_unsummed_states
    from connector.plugin.failure import keep_failure
    from connector.plugin.tiles import ask_for_tiles
    from connector.vector_math import settle_vector_math

    if FAILURE in os.environ:
        keep_failure(Path(os.environ[FAILURE]))
    ask_for_tiles()
    settle_vector_math()
    copy_unsummed_states()

    for architecture, known in list(ModelRegistry.models.items()):
        place = (getattr(known, "module_name", None), getattr(known, "class_name", None))
        carried = CARRIED.get(architecture)
        if carried is not None and place == (f"{MODELS}.{carried.module}", carried.model):
            ModelRegistry.register_model(architecture, f"{CLASSES}:{architecture}")
        elif place[0] == BACKEND and place[1] in BACKEND_CLASSES:
            ModelRegistry.register_model(architecture, f"{CLASSES}:{place[1]}")
