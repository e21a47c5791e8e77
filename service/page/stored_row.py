"""A stored row made ready to be shown: its tokens, and the size of its states. Runs in a process of its own.

What it reads may be damaged, and the tokenizer is a stranger's. Legend: T tokens, H hidden size.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.dataset.errors import DatasetError
from schemas.identity import Identity
from schemas.names import is_local_model
from service.errors import DatasetBroken, UnknownModel
from service.plan.model_folder import TOKENIZER_FILES, files_digest, local_model
from service.report.sample_text import Decode, Token, load_tokenizer, sample_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from schemas.dataset.shard import Shard

MAX_VALUES = 200
"""Of a layer that are drawn: each is the mean of as many tokens as that takes."""
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row; of a long one the first and the last tokens. `no_text` says why only ids are known.

    `rms` has the root mean square of the states of each layer, a value for every `step` tokens.
    """

    sample_id: str
    source_id: str | None
    num_tokens: int
    prompt_tokens: int
    supervised: int
    tokens: list[Token]
    no_text: str | None
    rms: dict[int, list[float]]
    step: int


def shown_row(
    file: Path, row: int, model: str, model_roots: tuple[Path, ...], identity: Identity
) -> ShownRow:
    """Read a row of a shard, and its text where the job's own tokenizer is on this machine.

    Raises DatasetBroken where the file is gone or damaged.
    """
    from schemas.dataset.shard import open_shard

    try:
        with open_shard(file) as shard:
            light = shard.light[row]
            step = -(-light.num_tokens // MAX_VALUES)
            rms = {layer: _means(_rms_T(shard, row, layer), step) for layer in identity.layer_ids}
    except (DatasetError, OSError, IndexError) as error:
        cure = "run `quarry verify` on the dataset"
        raise DatasetBroken(f"row {row} of {file.name} cannot be read: {error}", cure=cure) from error
    tokenizer = _tokenizer(model, model_roots, identity)
    return ShownRow(
        light.sample_id,
        light.source_id,
        light.num_tokens,
        light.prompt_tokens,
        int(light.loss_mask.sum()),
        sample_tokens(light, None if isinstance(tokenizer, str) else tokenizer),
        tokenizer if isinstance(tokenizer, str) else None,
        rms,
        step,
    )


def _rms_T(shard: "Shard", row: int, layer_id: int) -> "NDArray[np.float32]":
    """Return the root mean square of each token's state."""
    import numpy as np

    identity = shard.provenance.identity
    parts = shard.layer_bytes(row, layer_id)
    if identity.compression == "fp8":
        from schemas.dataset.states import states_of  # imports torch

        states_TH = states_of(parts, identity).float().numpy()
    elif identity.dtype == "bfloat16":
        states_TH = parts[0].view("<u2").reshape(-1, identity.hidden_size)
    else:
        states_TH = parts[0].view(f"<{identity.dtype[0]}{identity.dtype[5:]}")
    states_TH = states_TH.reshape(-1, identity.hidden_size)
    means = []
    for begin in range(0, len(states_TH), CHUNK_TOKENS):
        chunk = states_TH[begin : begin + CHUNK_TOKENS]
        if chunk.dtype == np.uint16:  # the upper half of a float32
            chunk = (chunk.astype("<u4") << 16).view("<f4")
        means.append(np.sqrt(np.square(chunk, dtype=np.float32).mean(axis=1)))
    return np.concatenate(means)


def _means(values_T: "NDArray[np.float32]", step: int) -> list[float]:
    return [float(values_T[begin : begin + step].mean()) for begin in range(0, len(values_T), step)]


def _tokenizer(model: str, model_roots: tuple[Path, ...], identity: Identity) -> tuple[Decode, int] | str:
    """Return what decodes with the job's own tokenizer, or why it is not here; nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if is_local_model(model):
            folder = local_model(model, None, model_roots).folder
        else:
            folder = Path(snapshot_download(model, revision=identity.revision, local_files_only=True))
    except (UnknownModel, LocalEntryNotFoundError):
        return "the model is not on this machine any more"
    if files_digest(folder, TOKENIZER_FILES) != identity.tokenizer_sha256:
        return "the tokenizer on this machine is not the job's"
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # seconds of imports that no tokenizer needs
    return load_tokenizer(folder)
