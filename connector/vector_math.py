"""Makes sine, cosine, tanh etc. correct on a CPU: one thread calls MKL's vector math (VML) first.

MKL chooses each function's kernel on its first call. If several torch threads make that call at once, as for
the first table of rotary embeddings in a fresh process, one of them may run a low-accuracy kernel over its
whole share, without an error (pytorch#188792, with MKL 2024.2, which torch's wheels bundle). One prior call
on one value, by one thread, prevents it. It was seen here in one process out of many: in float32 the states
of every position from the middle of the table on were off by 1e-4; noise of that size in the table explains
an error of 8e-4 seen in another. It was not seen in 5,000 fresh processes on an AMD CPU.
"""

from functools import cache

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10"),
    *("log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions that ATen passes to VML, in this build or in others (`aten/src/ATen/cpu/vml.h`)."""


@cache
def settle_vector_math() -> None:
    """Make MKL choose every function's kernel: 40 calls on one value, about a millisecond. Imports torch."""
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            getattr(torch, function)(one)
