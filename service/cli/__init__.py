"""The command line, with one file per group of commands. `main` is the entry point."""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line as `entry.main` does; Ctrl-C during its imports ends it as it does afterwards."""
    try:
        from service.cli.entry import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run(arguments)
