"""Finds out in a child process whether one of the engine's model classes can return states.

The class is never loaded in this process: that may initialize CUDA, after which a process cannot start an
engine. The child takes as long as importing vLLM, so its answer is cached next to vLLM's own cache of its
classes until the class's file or the version of vLLM changes. Imports vllm: import it lazily.
"""

import hashlib
import json
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import vllm
from vllm import envs

from schemas.dataset.seal import sealing
from service.lifeline import die_with_parent


@dataclass(frozen=True, slots=True)
class ModelClass:
    """Whether a class returns hidden states, and whether its module has the decoder class."""

    returns_states: bool
    has_decoder: bool


def ask_model_class(module: str, name: str, decoder: str | None = None) -> ModelClass | None:
    """Return what class `name` of `module` can do, or None if it cannot be loaded here.

    Raises RuntimeError if the child dies.
    """
    answer_file = _answer_file(module, name, decoder)
    with suppress(OSError, ValueError, TypeError):
        return ModelClass(**json.loads(answer_file.read_text()))
    # The child dies with this process: nothing else would end it.
    with ProcessPoolExecutor(1, get_context("spawn"), die_with_parent, (os.getpid(),)) as child:
        answer = child.submit(load_model_class, module, name, decoder).result()
    if answer is not None:
        # If the answer cannot be cached, the next start asks again.
        with suppress(OSError), sealing(answer_file) as temporary:
            temporary.write_text(json.dumps(asdict(answer)))
    return answer


def load_model_class(module: str, name: str, decoder: str | None) -> ModelClass | None:
    """Load the class in the child, and check what the runners check before they extract."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    try:
        loaded = import_module(module)
        return ModelClass(bool(supports_eagle3(getattr(loaded, name))), hasattr(loaded, decoder or name))
    except (ImportError, AttributeError):
        return None


def _answer_file(module: str, name: str, decoder: str | None) -> Path:
    source = find_spec(module)
    code = Path(source.origin).read_bytes() if source is not None and source.origin is not None else b""
    question = json.dumps([vllm.__version__, module, name, decoder]).encode()
    digest = hashlib.sha256(question + code).hexdigest()
    return Path(envs.VLLM_CACHE_ROOT) / "quarry" / f"{name}-{digest[:16]}.json"
