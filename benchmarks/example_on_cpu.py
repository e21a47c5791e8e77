"""vLLM's ExampleHiddenStatesConnector without CUDA: its own code, torch.cuda answered by the CPU.

Streams and events have nothing to wait for, since CPU copies are over when they return. The tensor that it
gathers from the cache lies in host memory already, so it is its own host copy: the example is spared the
second copy that it makes on a GPU. vLLM loads this through `kv_connector_module_path`.
"""

import contextlib
from types import ModuleType, SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Stream:
    def wait_event(self, event: "_Event") -> None:
        """Return at once."""


class _Event:
    def record(self, stream: _Stream | None = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Say that all is done."""
        return True


class _TorchOnCpu(ModuleType):
    """torch, but for what the example needs CUDA for."""

    cuda = SimpleNamespace(Stream=_Stream, Event=_Event, stream=lambda stream: contextlib.nullcontext())

    @staticmethod
    def empty_like(gathered: torch.Tensor, **_: object) -> torch.Tensor:
        return gathered

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


example.torch = _TorchOnCpu("torch")


class ExampleOnCpu(example.ExampleHiddenStatesConnector):  # type: ignore[misc]  # vLLM is not typed for us
    """The example connector under a name of this module, where vLLM looks for it."""
