"""Which versions of vLLM this connector supports. Imports nothing, since the service checks it at start."""

FIRST_SUPPORTED = (0, 26)
FIRST_BLSH = (0, 29)
FIRST_TRIMMED = (0, 29)
FIRST_RUNNER_V2 = (0, 29)
LAST_SUPPORTED = (0, 33)
"""vLLM versions. The cache is [B, S, L, H] before 0.29 and [B, L, S, H] since.

Also before 0.29, where a layer with a window shortens a hit of the prefix cache, a request keeps the longer
hit of the cache-only layer: blocks that it computes again, and that others may hold. They would look fresh.

Since 0.29, too, vLLM extracts with its model runner V2 on a GPU.

0.26 is the oldest version that rows were captured with. Before vllm#43433 (merged in 2026) the scheduler
stops stepping while blocks of finished requests are held: on CUDA the end of the last copies would go
unnoticed.
"""
SUPPORTED = f"{FIRST_SUPPORTED[0]}.{FIRST_SUPPORTED[1]} to {LAST_SUPPORTED[0]}.{LAST_SUPPORTED[1]}"

TESTED = ((0, 26), (0, 32), (0, 33))
"""Versions that rows were captured with: of 0.33 its Python files, over the compiled CPU kernels of 0.32.

For the others only the source was read (docs/tested.md).
"""


class LayoutError(ValueError):
    """The engine's cache layout or version is not supported by this connector; the engine must not start."""


def parse_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of an engine version.

    Raises LayoutError, which names the version, if it is not supported.
    """
    try:
        major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError as error:
        raise LayoutError(f"vLLM version {version!r} cannot be read; supported are {SUPPORTED}") from error
    if not FIRST_SUPPORTED <= (major, minor) <= LAST_SUPPORTED:
        raise LayoutError(f"vLLM {version} is not known to this connector; supported are {SUPPORTED}")
    return major, minor
