"""The checks that each row of states must pass on its own, on the bytes of a sealed shard.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from schemas.dataset.shard import LightRow, Shard, checksum_of
from schemas.dataset.states import StoredState, is_lossy, last_state, misfit_tokens, states_of
from service.plan.units import Tokenized, sample_digest
from service.proof.layer_tally import flag_tokens

Watch = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called for every layer that is read: its id, its states [T, H], each token's smallest and largest value
[T].
"""


@dataclass(frozen=True, slots=True)
class RowProof:
    """The result of reading a row again. `last` is its last token's pre-norm state, if N is captured."""

    faults: tuple[str, ...]
    last: StoredState | None


def prove_row(
    shard: Shard,
    row: int,
    *,
    vocab_size: int | None,
    watch: Watch | None = None,
) -> RowProof:
    """Check one row of a sealed shard, before the commit and in `quarry verify`.

    Its tokens and mask must be valid and match its sample id. For every layer, the checksum must match,
    values must be finite and vary, and no other layer may be equal. `vocab_size` is None if the model is not
    available.

    `watch` also gets each layer, so that nothing is read twice. Without it the bytes are only compared with
    their checksums, at memory speed, which is enough if the values were checked during capture.

    Rounding to fp8 may make two layers equal, or a token constant, without a fault; but codes and scales must
    be ones that rounding can produce.

    Raises DatasetError if the bytes cannot be read at all, OSError.
    """
    identity = shard.provenance.identity
    faults = list(_light_faults(shard.light[row], vocab_size))
    # The id of a row from a conversation rendered again also covers its messages, which the row does not
    # have.
    misnamed = None if identity.is_rendered_again else name_fault(shard.light[row])
    faults += [] if misnamed is None else [misnamed]
    seen: dict[int, int] = {}
    last: StoredState | None = None
    for layer_id, stored in zip(identity.layer_ids, shard.light[row].checksums, strict=True):
        layer = shard.layer_bytes(row, layer_id)
        checksum = checksum_of(layer)
        if checksum != stored:
            faults.append(f"layer {layer_id}: its bytes have xxh3 {checksum:016x}, {stored:016x} is stored")
        if checksum in seen and not is_lossy(identity):
            faults.append(f"layers {seen[checksum]} and {layer_id} hold the same states")
        seen[checksum] = layer_id
        if watch is not None:
            states_TH = states_of(layer, identity)
            low_T, high_T = states_TH.amin(dim=1), states_TH.amax(dim=1)
            of_layer = _value_faults(low_T, high_T, layer_id, misfit_tokens(layer, identity))
            faults += [f"layer {layer_id}: {fault}" for fault in of_layer]
            watch(layer_id, states_TH, low_T, high_T)
        if layer_id == identity.num_layers:
            last = last_state(layer, identity)
    return RowProof(tuple(faults), last)


def _light_faults(light: LightRow, vocab_size: int | None) -> Iterator[str]:
    low, high = int(light.input_ids.min()), int(light.input_ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        yield f"token ids {low}..{high} are outside the vocabulary of {vocab_size or 'any model'}"
    if int(light.loss_mask.max()) > 1:
        yield f"loss_mask holds {int(light.loss_mask.max())}; 0 and 1 are flags"


def _value_faults(
    low_T: torch.Tensor, high_T: torch.Tensor, layer_id: int, misfit_T: torch.Tensor | None
) -> list[str]:
    """Return the faults of the values; a padding token's embedding (layer 0) may be constant or zero.

    `misfit_T` marks tokens that rounding to fp8 cannot produce; None if nothing was rounded.
    """
    not_finite_T, constant_T, zero_T = flag_tokens(low_T, high_T)
    faults = [_tokens("not finite", not_finite_T)] if bool(not_finite_T.any()) else []
    if misfit_T is not None:
        if bool(misfit_T.any()):
            faults.append(_tokens("no codes of its scale", misfit_T))
        constant_T = zero_T
    if layer_id != 0 and bool(constant_T.any()):
        faults.append(_tokens("all zero" if bool(zero_T.any()) else "constant", constant_T))
    return faults


def _tokens(what: str, flags_T: torch.Tensor) -> str:
    """Return `what in 3 of 17 tokens, the first at 14`."""
    count, first = int(flags_T.sum()), int(flags_T.int().argmax())
    return f"{what} in {count} of {len(flags_T)} tokens, the first at {first}"


def name_fault(light: LightRow) -> str | None:
    """Return how a row's source id, planned tokens and mask contradict its sample id, their hash, or None.

    The id was assigned before the target generated tokens, so only the prompt's tokens are checked against
    it.
    """
    planned = Tokenized(light.input_ids[: light.prompt_tokens], light.loss_mask[: light.prompt_tokens])
    expected = sample_digest(light.source_id or "", planned).hex()
    if light.sample_id == expected:
        return None
    return f"its source id, tokens and mask are those of sample {expected}"
