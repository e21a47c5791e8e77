"""The carried classes, made when vLLM first loads one: `connector.plugin.classes:MixtralForCausalLM`."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, supports_eagle3

from connector.plugin.backend import RecordsInput
from connector.plugin.carried import BACKEND, BACKEND_CLASSES, CARRIED, MODELS, Carried
from connector.plugin.recording import RecordingDecoder


def __getattr__(name: str) -> type:
    if name in CARRIED:
        our_class = carried_class(CARRIED[name])
    elif name in BACKEND_CLASSES:
        our_class = backend_class(name)
    else:
        raise AttributeError(name)
    globals()[name] = our_class
    return our_class


def carried_class(carried: Carried) -> type:
    """Return the engine's class with support for auxiliary hidden states.

    If the engine's class supports them itself, or its decoder is not the one we know, return it unchanged.
    """
    module = importlib.import_module(f"{MODELS}.{carried.module}")
    engine_class: Any = getattr(module, carried.model)
    if supports_eagle3(engine_class) or not (carried.decoder is None or hasattr(module, carried.decoder)):
        own: type = engine_class
        return own

    class ReturnsStates(engine_class, SupportsEagle3):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            with _recorded_decoder(module, carried):
                super().__init__(vllm_config=vllm_config, prefix=prefix)

    return _named_as(engine_class, ReturnsStates)


def backend_class(name: str) -> type:
    """Return a class of the engine's Transformers backend that can return state 0 as well."""
    engine_class: Any = getattr(importlib.import_module(BACKEND), name)

    class ReturnsInput(RecordsInput, engine_class):  # type: ignore[misc]
        pass

    return _named_as(engine_class, ReturnsInput)


@contextmanager
def _recorded_decoder(module: ModuleType, carried: Carried) -> Iterator[None]:
    """Within the context, let the constructors in `module` build a decoder that records."""
    if carried.decoder is None:
        yield
        return
    engine_decoder = getattr(module, carried.decoder)
    setattr(module, carried.decoder, _recording(engine_decoder, sums=carried.sums))
    try:
        yield
    finally:
        setattr(module, carried.decoder, engine_decoder)


def _recording(engine_decoder: Any, *, sums: bool) -> type:
    if issubclass(engine_decoder, EagleModelMixin):
        own: type = engine_decoder
        return own

    class Decoder(RecordingDecoder, engine_decoder):  # type: ignore[misc]
        engine_forward = staticmethod(engine_decoder.forward)

    Decoder.sums = sums
    return _named_as(engine_decoder, Decoder)


def _named_as(engine_class: type, our_class: type) -> type:
    """Give our class the name of the engine's class that it replaces."""
    our_class.__name__ = our_class.__qualname__ = engine_class.__name__
    return our_class
