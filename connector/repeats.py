"""Finds states that repeat: a row that holds another row's block, or one of its own blocks twice.

A state begins as its own token's embedding, so the same bytes cannot be the states of two different tokens.
The check remembers the states and ids of the last tokens drained. It needs no model and checks every token.
No other check would see such a block in an auxiliary layer of a single row: the canary runs other prompts,
and the logits come from the last layer.

A state is recognised by its sum (`connector.sums`). Layer 0 is not checked: two tokens may have the same
embedding, and with learned positions one token has many.

Legend: T tokens, L captured layers, E entries.
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from connector.rowcheck import StatesWrongError
from connector.sums import Sums

ENTRIES_MAX = 2**20
"""Bounds the memory, which is 12 bytes per entry and layer."""
_LEAST_PAIRS = 2
"""How many different pairs of tokens must share a state with earlier rows before a row is refused.

A single pair may be two untrained tokens of the vocabulary with the same embedding. That cannot explain a
repeat within one row, where different tokens come before each of them.
"""


class RepeatCheck:
    """A hash table for each layer. A state's sum gives its slot; a newer state overwrites an older one.

    It holds as many tokens as the engine's cache, since the content of a stale block was drained no longer
    ago than that. All writer threads share one instance.
    """

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        """Make room for `num_tokens`, the slots of the engine's cache."""
        entries = min(ENTRIES_MAX, 1 << num_tokens.bit_length())
        self._mask = entries - 1
        self._sums_LE = np.zeros((num_layers, entries), np.int64)
        self._tokens_LE = np.full((num_layers, entries), -1, np.int32)
        self._lock = threading.Lock()

    def check(self, sums_LT: Sums, token_ids_T: NDArray[np.int32], layer_ids: Sequence[int]) -> None:
        """Compare a row with the rows before it and with itself, and remember it.

        Raises StatesWrongError.
        """
        with self._lock:
            for layer, layer_id in enumerate(layer_ids):
                if layer_id == 0:
                    continue
                sums_T = sums_LT[layer]
                places_T = (sums_T ^ (sums_T >> 32)) & self._mask
                # First against earlier rows, then against the row itself.
                for least_pairs in (_LEAST_PAIRS, 1):
                    known_T, earlier_T = self._sums_LE[layer, places_T], self._tokens_LE[layer, places_T]
                    repeated_T = (known_T == sums_T) & (earlier_T >= 0) & (earlier_T != token_ids_T)
                    _refuse(np.flatnonzero(repeated_T), token_ids_T, earlier_T, layer_id, least_pairs)
                    self._sums_LE[layer, places_T] = sums_T
                    self._tokens_LE[layer, places_T] = token_ids_T


def _refuse(
    repeated: NDArray[np.intp],
    token_ids_T: NDArray[np.int32],
    earlier_T: NDArray[np.int32],
    layer_id: int,
    least_pairs: int,
) -> None:
    """Raise StatesWrongError if the positions `repeated` hold `least_pairs` or more different token pairs."""
    pairs = {(int(token_ids_T[at]), int(earlier_T[at])) for at in repeated}
    if len(pairs) >= least_pairs:
        at = repeated[0]
        first = f"token {token_ids_T[at]} at {at} has the state of token {earlier_T[at]}"
        raise StatesWrongError(
            f"layer {layer_id} holds the states of other tokens at {len(repeated)} of {len(token_ids_T)}, "
            f"a stale block or another row's: {first}"
        )
