"""The sums of states, as the connector takes them where it reads them."""

import numpy as np
import torch

from connector.sums import Sums, add_up, words_of


def token_sums(states_LTH: torch.Tensor) -> Sums:
    """Return the sums of states in host memory, whose H values lie side by side."""
    words_LTW = words_of(states_LTH)
    sums_LT = np.empty(words_LTW.shape[:-1], np.int64)
    add_up(words_LTW, sums_LT)
    return sums_LT
