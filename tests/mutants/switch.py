"""What the copy of the product asks at every site: are you the mutant?

Both questions come by the environment, so that processes which a test starts get them as well.
"""

import os
from contextlib import suppress

MUTANT = "QUARRY_MUTANT"
"""Names the site that is to go wrong."""
TRACE = "QUARRY_MUTANT_TRACE"
"""Names a file to which every site is appended when it is first reached."""

_open, _write, _close = os.open, os.write, os.close  # tests of a full disk plant faults in these
_traced: set[tuple[str, str]] = set()


def mutated(site: str) -> bool:
    """Return whether this site is the mutant."""
    trace = os.environ.get(TRACE)
    if trace and (trace, site) not in _traced:
        _traced.add((trace, site))
        with suppress(OSError):  # a limit on a child's files also holds for the trace
            file = _open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            _write(file, f"{site}\n".encode())
            _close(file)
    return os.environ.get(MUTANT) == site
