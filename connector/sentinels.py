"""Sentinels in the slots of fresh blocks show which states the engine never stored.

The engine hands blocks from one request to the next as they are. Were the capture of a step ever skipped, the
row would hold an earlier tenant's states: finite, of the right shape, and wrong. So before a step runs, every
slot of the blocks that it was given gets the sentinel as its first and its last element. Storing a token's
state overwrites both, and the row check refuses a row that still holds them.

It is done when a block is given out, not when it is drained: drained blocks stay in the prefix cache, and a
later request may be given them for their states. It costs two elements of H, on the stream of the model.

The sentinel is finite. A block may pass to an attention layer next, whose kernels weigh what lies behind the
end of a sequence with 0, and 0 times NaN is NaN.

Legend: B blocks, L captured layers, S slots a block, H hidden size.
"""

from collections.abc import Sequence

import torch

SENTINELS = {torch.bfloat16: 0x7F65, torch.float16: 0x7BA5, torch.float32: 0x7F65_A5A5}
"""Bits of a positive number close to the largest of its dtype: 3e38, and 62,624 in float16."""

_SAME_WIDTH = {2: torch.int16, 4: torch.int32}


class Sentinels:
    """Writes sentinels into one cache. Called on the engine's step thread, before the step's forward pass."""

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """Look at the outer elements of `cache_BLSH`, the engine's own memory, as integers."""
        self._bits = SENTINELS[cache_BLSH.dtype]
        outer = max(1, cache_BLSH.shape[-1] - 1)
        self._outer_BLS2 = cache_BLSH.view(_SAME_WIDTH[cache_BLSH.element_size()])[..., ::outer]

    def place(self, block_ids: Sequence[int]) -> None:
        """Write into every slot of `block_ids`; on CUDA enqueued on the current stream, never waited for."""
        if not block_ids:
            return
        index = torch.tensor(block_ids, dtype=torch.int64)
        if self._outer_BLS2.is_cuda:
            index = index.pin_memory().to(self._outer_BLS2.device, non_blocking=True)
        self._outer_BLS2.index_fill_(0, index, self._bits)
