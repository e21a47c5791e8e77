"""Shows a stored row, in a child: its tokens as text, and the magnitude of its states.

The file may be damaged, and the tokenizer is untrusted. Legend: T tokens, B bytes of a state.
"""

from collections.abc import Callable
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
from service.plan.child.task import RowTask, ShownRow
from service.plan.model_folder import TOKENIZER_FILES, files_digest, local_model
from service.report.sample_text import Decode, load_tokenizer, sample_tokens

MAX_VALUES = 200
"""Maximum values per layer: each is the mean over as many tokens as needed."""
_CODES = np.arange(256)
_EXPONENT, _FRACTION = _CODES >> 3 & 15, (_CODES & 7) / 8
_SIZES = np.where(_EXPONENT, 1 + _FRACTION, _FRACTION) * 2.0 ** (np.maximum(_EXPONENT, 1) - 7)
DECODE: dict[str, Callable[[NDArray[np.uint8]], NDArray[Any]]] = {
    "fp8": lambda codes: _SIZES[codes],
    "bfloat16": lambda raw: (raw.view("<u2").astype("<u4") << 16).view("<f4"),
    "float16": lambda raw: raw.view("<f2"),
    "float32": lambda raw: raw.view("<f4"),
}
"""Decode bytes to elements; for fp8, to magnitudes before the token's scale. They equal torch's values,
without the second that importing torch takes.
"""


def show(task: RowTask) -> ShownRow | str:
    """Return a row of a shard, or why it cannot be read."""
    try:
        with open_shard(task.file) as shard:
            light = shard.light[task.row]
            step = -(-light.num_tokens // MAX_VALUES)
            rms = {
                layer_id: _rms(shard, task.row, layer_id, light.num_tokens, step)
                for layer_id in task.identity.layer_ids
            }
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
        tokens=tuple(tokens),
        no_text=None if is_text else str(decoding),
        rms=rms,
        step=step,
    )


def _rms(shard: Shard, row: int, layer_id: int, num_tokens: int, step: int) -> tuple[float, ...]:
    """Return the root mean square of the tokens' states, averaged over each `step` tokens."""
    states, *scales = shard.layer_bytes(row, layer_id, num_tokens)
    decode = DECODE["fp8" if scales else shard.provenance.identity.dtype]
    states_TB = states.reshape(num_tokens, -1)
    scales_T = scales[0].view("<f4") if scales else np.ones(num_tokens)
    means = []
    for begin in range(0, num_tokens, step):  # limits how much is decoded at once
        part = slice(begin, begin + step)
        squares_T = np.square(decode(states_TB[part]), dtype=np.float64).mean(axis=1)
        means.append(float((np.sqrt(squares_T) * scales_T[part]).mean()))
    if not np.isfinite(means).all():
        raise DatasetError(f"the states of layer {layer_id} are not finite")
    return tuple(means)


def _tokenizer(task: RowTask) -> tuple[Decode, int] | str:
    """Return a decoder with the job's own tokenizer, or why it is not available; nothing is downloaded."""
    try:
        if is_local_model(task.model):
            folder = local_model(task.model, None, task.model_roots, None).folder
        else:
            revision = task.identity.revision
            folder = Path(snapshot_download(task.model, revision=revision, local_files_only=True))
    except (UnknownModel, LocalEntryNotFoundError):
        return "the model is not on this machine any more"
    if files_digest(folder, TOKENIZER_FILES) != task.identity.tokenizer_sha256:
        return "the tokenizer on this machine is not the job's"
    return load_tokenizer(folder)
