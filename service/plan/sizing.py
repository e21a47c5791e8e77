"""What a rate of tokens asks of the host: PCIe, cores, writers, disk, uplink. Arithmetic on measured rates.

The rates are settings; `docs/sizing.md` says where their defaults were measured.
"""

import math

from schemas.job import Sizing
from service.settings import Settings


def size(
    tokens: int,
    bytes_per_token: int,
    tokens_per_s: float,
    gpus: int,
    settings: Settings,
    stored_bytes_per_token: int | None = None,
) -> Sizing:
    """Return what `tokens` of states cost at a rate that each of the GPUs computes at.

    Args:
        tokens: of the whole job.
        bytes_per_token: of captured states.
        tokens_per_s: of one GPU; an engine's own divided by its GPUs under tensor parallelism.
        gpus: all of them.
        settings: holds the rates of the host.
        stored_bytes_per_token: of stored states, where that is known before; else they count as captured.
    """
    per_gpu = tokens_per_s * bytes_per_token
    if stored_bytes_per_token is None:
        stored_bytes_per_token = bytes_per_token
    stored = gpus * tokens_per_s * stored_bytes_per_token
    return Sizing(
        gpus=gpus,
        tokens_per_s=tokens_per_s,
        seconds=tokens / (tokens_per_s * gpus),
        drain_bytes_per_s=per_gpu,
        drain_share=per_gpu / settings.sizing_drain_bytes_per_s,
        writer_threads=max(2, math.ceil(per_gpu / settings.sizing_writer_bytes_per_s)),
        cores=per_gpu / 1e9 * settings.sizing_core_s_per_gb,
        disk_bytes_per_s=stored,
        uplink_bits_per_s=8 * stored,
    )
