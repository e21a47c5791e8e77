"""The command line, with one file per group of commands. `main` is the entry point."""

from service.cli.entry import main

__all__ = ["main"]
