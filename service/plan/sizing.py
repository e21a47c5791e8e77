"""What a rate of tokens asks of the host: PCIe, cores, writers, disk, uplink. Arithmetic on measured rates.

The link was measured on one H200's machine (PCIe 5 x16, `benchmarks/results/gpu-drain.json`), the cores on a
machine of two (`cpu-writer.json`, `job.json`). How many writers scale was not, and a disk is whoever's own:
that is for whoever sizes to hold against the bytes that are told.
"""

import math

from schemas.job import Sizing

DRAIN_BYTES_PER_S = 45e9
"""Drained from a GPU that computes meanwhile; alone it is 54e9, and a plain pinned copy 55e9."""
WRITER_BYTES_PER_S = 1.28e9
"""Checked, framed and sealed by one thread alone on a disk that takes 1.96e9 of write() and fsync(): nearly
half of its time it waits for that disk."""
WRITER_CORE_S_PER_GB = 0.42
"""Of a core for 1e9 bytes of states: the writer with its checks and its xxh3, and the kernel's part."""
PROOF_CORE_S_PER_GB = 0.29
"""Of the sealed unit, read back: in one unit of a gigabyte; in units of 65 MB it is 1.3, because a unit has
its logits recomputed in a few rows at least."""
DIGEST_CORE_S_PER_GB = 0.70
"""Of the sha256 that the Hub asks for, taken at publication: hashlib over memory, the read not counted."""
CORE_S_PER_GB = WRITER_CORE_S_PER_GB + PROOF_CORE_S_PER_GB + DIGEST_CORE_S_PER_GB


def size(
    tokens: int,
    bytes_per_token: int,
    tokens_per_s: float,
    gpus: int,
    stored_bytes_per_token: int | None = None,
) -> Sizing:
    """Say what `tokens` of states cost at a rate that each of the GPUs computes at.

    Args:
        tokens: of the whole job.
        bytes_per_token: of captured states.
        tokens_per_s: of one GPU; an engine's own divided by its GPUs under tensor parallelism.
        gpus: all of them.
        stored_bytes_per_token: of stored states, where they are told before; else they count as captured.
    """
    per_gpu = tokens_per_s * bytes_per_token
    stored = (
        gpus * tokens_per_s * (bytes_per_token if stored_bytes_per_token is None else stored_bytes_per_token)
    )
    return Sizing(
        gpus=gpus,
        tokens_per_s=tokens_per_s,
        seconds=tokens / (tokens_per_s * gpus),
        drain_bytes_per_s=per_gpu,
        drain_share=per_gpu / DRAIN_BYTES_PER_S,
        writer_threads=max(2, math.ceil(per_gpu / WRITER_BYTES_PER_S)),
        cores=per_gpu / 1e9 * CORE_S_PER_GB,
        disk_bytes_per_s=stored,
        uplink_bits_per_s=8 * stored,
    )
