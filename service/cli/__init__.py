"""The command line, a file for each group of verbs. `main` is the entry point."""

from service.cli.entry import main

__all__ = ["main"]
