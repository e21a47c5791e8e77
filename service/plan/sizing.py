"""What a rate of tokens asks of the host: PCIe, writers, disk, uplink. Arithmetic on measured rates.

The measured ones are those of one H200's machine (PCIe 5 x16, `benchmarks/results/gpu-drain.json`); what they
do not cover, other disks above all, is for whoever sizes to hold against the bytes that are told.
"""

import math

from schemas.job import Sizing

DRAIN_BYTES_PER_S = 45e9
"""Drained from a GPU that computes meanwhile; alone it is 54e9, and a plain pinned copy 55e9."""
WRITER_BYTES_PER_S = 0.24e9
"""Proven and sealed by one thread of eight on a RAM disk; of two threads each does 0.47e9."""


def size(tokens: int, bytes_per_token: int, tokens_per_s: float, gpus: int) -> Sizing:
    """Say what `tokens` of states cost at a rate that each of the GPUs computes at.

    Args:
        tokens: of the whole job.
        bytes_per_token: of stored states.
        tokens_per_s: of one GPU; an engine's own divided by its GPUs under tensor parallelism.
        gpus: all of them.
    """
    per_gpu = tokens_per_s * bytes_per_token
    return Sizing(
        gpus=gpus,
        tokens_per_s=tokens_per_s,
        seconds=tokens / (tokens_per_s * gpus),
        drain_bytes_per_s=per_gpu,
        drain_share=per_gpu / DRAIN_BYTES_PER_S,
        writer_threads=max(2, math.ceil(per_gpu / WRITER_BYTES_PER_S)),
        disk_bytes_per_s=per_gpu * gpus,
        uplink_bits_per_s=8 * per_gpu * gpus,
    )
