"""What the copy of the product asks at every site: are you the mutant?

Both questions come by the environment, so that processes which a test starts get them as well.
"""

import os
from contextlib import suppress

MUTANT = "QUARRY_MUTANT"
"""Names the site that is to go wrong."""
TRACE = "QUARRY_MUTANT_TRACE"
"""Names a link to the file of the test under way, to which each site is appended when it is first reached.

A link, for a process may serve several tests, and its environment is that of the first.
"""

_open, _write, _close, _readlink = os.open, os.write, os.close, os.readlink  # tests plant faults in these
_traced: set[tuple[str, str]] = set()


def mutated(site: str) -> bool:
    """Return whether this site is the mutant."""
    link = os.environ.get(TRACE)
    if link and (test := _readlink(link), site) not in _traced:
        _traced.add((test, site))
        with suppress(OSError):  # a limit on a child's files also holds for the trace
            file = _open(test, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            _write(file, f"{site}\n".encode())
            _close(file)
    return os.environ.get(MUTANT) == site
