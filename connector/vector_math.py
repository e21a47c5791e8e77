"""Right sines, cosines and tanhs on a CPU: MKL's vector math (VML) is called once by one thread first.

MKL chooses each function's kernel on its first call. Where several threads of torch make that call at once,
as in a fresh process's first table of rotary embeddings, one of them may run a kernel of low accuracy over
its whole share, without an error (pytorch#188792, of MKL 2024.2, which torch's wheels hold). One call on
one value, by one thread, ends it. Seen here in one process out of many: in float32 the states of every
position from the middle of the table on were 1e-4 off; noise of that size in the table explains 8e-4 in
another. In 5,000 fresh processes on a CPU of AMD's it was not seen.
"""

from functools import cache

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10"),
    *("log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""What ATen gives to VML, and what other builds of it may (`aten/src/ATen/cpu/vml.h`)."""


@cache
def settle_vector_math() -> None:
    """Let every function choose its kernel: 40 calls on one value, about a millisecond. Imports torch."""
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            getattr(torch, function)(one)
