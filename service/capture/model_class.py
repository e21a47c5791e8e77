"""Finds out in a child process what one of the engine's model classes can do.

In this process it is never loaded: that may initialize CUDA, after which a process can start no engine. The
child takes as long as vLLM takes to be imported, so its answer is kept beside those that vLLM keeps of its
own classes, until the class's file or the version of vLLM changes. Imports vllm: import it lazily.
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
    """Return what class `name` of `module` can do; none if it cannot be loaded here.

    Raises RuntimeError if the child dies.
    """
    answer_file = _answer_file(module, name, decoder)
    with suppress(OSError, ValueError, TypeError):
        return ModelClass(**json.loads(answer_file.read_text()))
    # The child ends with this process: nobody else would end it.
    with ProcessPoolExecutor(1, get_context("spawn"), die_with_parent, (os.getpid(),)) as child:
        answer = child.submit(load_model_class, module, name, decoder).result()
    if answer is not None:
        # Where nothing can be kept, the next start asks again.
        with suppress(OSError), sealing(answer_file) as temporary:
            temporary.write_text(json.dumps(asdict(answer)))
    return answer


def load_model_class(module: str, name: str, decoder: str | None) -> ModelClass | None:
    """Load the class into the child, and ask it what the runners ask before they extract."""
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
