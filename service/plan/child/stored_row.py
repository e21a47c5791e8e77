"""What a child shows of a stored row: its tokens as text, and the size of its states.

The file may be damaged, and the tokenizer is a stranger's. Legend: T tokens, H hidden size.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from numpy.typing import NDArray

from schemas.dataset.errors import DatasetError
from schemas.dataset.shard import Shard, open_shard
from schemas.names import is_local_model
from service.errors import UnknownModel
from service.plan.child.task import RowTask, ShownRow, ShownToken
from service.plan.model_folder import TOKENIZER_FILES, files_digest, local_model
from service.report.sample_text import Decode, load_tokenizer, sample_tokens

MAX_VALUES = 200
"""Of a layer: each is the mean of as many tokens as that takes."""
CHUNK_TOKENS = 256
_FP8_BIAS = 7


def show(task: RowTask) -> ShownRow | str:
    """Return a row of a shard, or why it cannot be read."""
    try:
        with open_shard(task.file) as shard:
            light = shard.light[task.row]
            step = -(-light.num_tokens // MAX_VALUES)
            rms = {layer: _means(_rms_T(shard, task.row, layer), step) for layer in task.identity.layer_ids}
    except (DatasetError, OSError, IndexError) as error:
        return str(error)
    decoding = _tokenizer(task)
    is_text = not isinstance(decoding, str)
    tokens = sample_tokens(light, decoding if is_text else None)  # type: ignore[arg-type]  # told by `is_text`
    return ShownRow(
        sample_id=light.sample_id,
        source_id=light.source_id,
        num_tokens=light.num_tokens,
        prompt_tokens=light.prompt_tokens,
        supervised=int(light.loss_mask.sum()),
        tokens=tuple(ShownToken(one.place, one.id, one.text, one.supervised) for one in tokens),
        no_text=None if is_text else str(decoding),
        rms=rms,
        step=step,
    )


def _rms_T(shard: Shard, row: int, layer_id: int) -> NDArray[np.float64]:
    """Return the root mean square of each token's state."""
    identity = shard.provenance.identity
    states, *scales = shard.layer_bytes(row, layer_id)
    by_token = states.reshape(shard.light[row].num_tokens, -1)
    roots = [
        np.sqrt(np.square(chunk_TH, dtype=np.float64).mean(axis=1))
        for chunk_TH in _chunks(by_token, identity.dtype, is_fp8=bool(scales))
    ]
    rms_T: NDArray[np.float64] = np.concatenate(roots)
    if scales:
        rms_T *= scales[0].view("<f4")
    if not np.isfinite(rms_T).all():
        raise DatasetError(f"the states of layer {layer_id} are not finite")
    return rms_T


def _chunks(by_token: NDArray[np.uint8], dtype: str, *, is_fp8: bool) -> Iterator[NDArray[Any]]:
    """Yield states [T, H] of some tokens at a time; fp8 codes without their scales."""
    for begin in range(0, len(by_token), CHUNK_TOKENS):
        chunk = by_token[begin : begin + CHUNK_TOKENS]
        if is_fp8:
            yield _fp8_values()[chunk]
        elif dtype == "bfloat16":  # the upper half of a float32
            yield (chunk.view("<u2").astype("<u4") << 16).view("<f4")
        else:
            yield chunk.view(f"<f{2 if dtype == 'float16' else 4}")


def _fp8_values() -> NDArray[np.float64]:
    """Return the value of each code of float8_e4m3fn."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    whole = np.where(exponent, 1 + fraction, fraction)
    size = whole * 2.0 ** (np.maximum(exponent, 1) - _FP8_BIAS)
    return np.where(codes & 128, -size, size).astype(np.float32)


def _means(values_T: NDArray[np.float64], step: int) -> tuple[float, ...]:
    return tuple(float(values_T[begin : begin + step].mean()) for begin in range(0, len(values_T), step))


def _tokenizer(task: RowTask) -> tuple[Decode, int] | str:
    """Return what decodes with the job's own tokenizer, or why it is not here; nothing is fetched."""
    try:
        if is_local_model(task.model):
            folder = local_model(task.model, None, task.model_roots).folder
        else:
            revision = task.identity.revision
            folder = Path(snapshot_download(task.model, revision=revision, local_files_only=True))
    except (UnknownModel, LocalEntryNotFoundError):
        return "the model is not on this machine any more"
    if files_digest(folder, TOKENIZER_FILES) != task.identity.tokenizer_sha256:
        return "the tokenizer on this machine is not the job's"
    return load_tokenizer(folder)
