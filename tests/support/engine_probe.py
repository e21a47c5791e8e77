"""What tests do inside vLLM's worker processes, by `collective_rpc` to an extension of the worker class.

Named in the engine's option `worker_extension_cls`.
"""

import threading
from typing import TYPE_CHECKING, Any

from tests.support.engine_bench import Bench

if TYPE_CHECKING:
    import torch

    from connector.shards import EncodedRow, UnitWriter

PROBED = {"worker_extension_cls": "tests.support.engine_probe.EngineProbe"}
"""The engine option that lets `ask` reach its workers."""


async def ask(bench: Bench, method: str, *args: Any) -> None:
    """Call a method of `EngineProbe` in every worker, between two steps of the engine."""
    await bench.engine._llm.collective_rpc(method, args=args)


class EngineProbe:
    """Becomes a base of the worker's class, so `self` is vLLM's worker."""

    model_runner: Any

    def capture_up_to(self, num_tokens: int | None) -> None:
        """Make the runner skip the capture of every batch that holds a longer sequence; null captures all.

        The runner has this condition for drafters with a shorter context than the target's.
        """
        runner = self.model_runner
        runner.effective_drafter_max_model_len = runner.max_model_len if num_tokens is None else num_tokens

    def stall_writers(self) -> None:
        """Let no row be written, so that the host pool stays full."""
        from connector.shards import UnitWriter

        _Stall.go.clear()
        if UnitWriter.append is not _Stall.append:
            _Stall.real, UnitWriter.append = UnitWriter.append, _Stall.append

    def release_writers(self) -> None:
        """Let rows be written again."""
        _Stall.go.set()

    def mend_sampling(self) -> None:
        """Replace the CPU build's kernel that spreads a request's temperature over its tokens.

        Its own writes into a copy and leaves the result as the memory was.
        """
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: "torch.Tensor",
    values: "torch.Tensor",
    ends: "torch.Tensor",
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


class _Stall:
    """The writer's `append` behind a gate."""

    go = threading.Event()
    real: Any = None

    def append(self: "UnitWriter", encoded: "EncodedRow") -> None:  # type: ignore[misc]
        _Stall.go.wait()
        _Stall.real(self, encoded)
