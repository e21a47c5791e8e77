"""Which versions of vLLM this connector was written for. Imports nothing, since the service asks at start."""

FIRST_SUPPORTED = (0, 26)
FIRST_BLSH = (0, 29)
LAST_SUPPORTED = (0, 33)
"""vLLM versions: [B, S, L, H] views before 0.29, [B, L, S, H] from there on.

0.26 is the oldest that rows were captured on. Before vllm#43433 (merged in 2026) the scheduler stops stepping
while blocks of finished requests are held: on CUDA nobody would see that the last copies are done.
"""
SUPPORTED = f"{FIRST_SUPPORTED[0]}.{FIRST_SUPPORTED[1]} to {LAST_SUPPORTED[0]}.{LAST_SUPPORTED[1]}"

TESTED = ((0, 26), (0, 32))
"""Those that rows were captured on; of the others the sources were read (docs/tested.md)."""


class LayoutError(ValueError):
    """The engine's cache is not what this connector was written for; the engine must not start."""


def parse_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of an engine version.

    Raises LayoutError for one that is not supported, with its number.
    """
    try:
        major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError as error:
        raise LayoutError(f"vLLM version {version!r} cannot be read; supported are {SUPPORTED}") from error
    if not FIRST_SUPPORTED <= (major, minor) <= LAST_SUPPORTED:
        raise LayoutError(f"vLLM {version} is not known to this connector; supported are {SUPPORTED}")
    return major, minor
