"""The dataset's file format: everything that reads or writes a dataset's bytes.

    columns        the Arrow schemas of shard, index and plan
    codecs/        a layer's states as the bytes of its columns: planes, fp8
    framing        Parquet around those bytes, by `thrift`
    direct, files  past the page cache, or ranges of a file; `memory` for both
    seal           the one way a file gets its final name
    shard, states  what is read back of a shard, as bytes and as tensors
    index, token_counts, norm, manifest   the files beside the shards

Only `codecs.fp8`, `states` and `norm` import torch.
"""
