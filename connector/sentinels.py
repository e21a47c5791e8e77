"""Sentinels in the slots of fresh blocks show which states the engine never stored.

The engine passes blocks from one request to the next without clearing them. If the capture of a step were
ever skipped, the row would hold an earlier request's states: finite, of the right shape, and wrong. So before
a step runs, the sentinel is written as the first and last element of every slot of the blocks that it was
given. Storing a token's state overwrites both, and the row check refuses a row that still holds them.

This is done when a block is allocated, not when it is drained: drained blocks stay in the prefix cache, and a
later request may reuse their states. It writes two of a slot's H elements, on the model's stream.

The sentinel is finite. The block may be given to an attention layer next, whose kernels weight what is past
the end of a sequence with 0, and 0 times NaN is NaN.

Legend: B blocks, L captured layers, S slots per block, H hidden size.
"""

from collections.abc import Sequence

import torch

SENTINELS = {torch.bfloat16: 0x7F65, torch.float16: 0x7BA5, torch.float32: 0x7F65_A5A5}
"""Bits of a positive number close to the maximum of its dtype: 3e38, or 62,624 in float16."""

_SAME_WIDTH = {2: torch.int16, 4: torch.int32}


class Sentinels:
    """Writes sentinels into one cache. Called on the engine's step thread, before the step's forward pass."""

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """View the first and last elements of each state in `cache_BLSH`, the engine's memory, as ints."""
        self._bits = SENTINELS[cache_BLSH.dtype]
        outer = max(1, cache_BLSH.shape[-1] - 1)
        self._outer_BLS2 = cache_BLSH.view(_SAME_WIDTH[cache_BLSH.element_size()])[..., ::outer]

    def place(self, block_ids: Sequence[int]) -> None:
        """Write into every slot of `block_ids`; on CUDA this is only enqueued on the current stream."""
        if not block_ids:
            return
        index = torch.tensor(block_ids, dtype=torch.int64)
        if self._outer_BLS2.is_cuda:
            index = index.pin_memory().to(self._outer_BLS2.device, non_blocking=True)
        self._outer_BLS2.index_fill_(0, index, self._bits)
