"""Writes a dataset in the format of a drafter's trainer: every tensor where, and as, that trainer reads it.

Data goes dataset -> source -> format -> sealed files; `run` drives, `record` remembers what is being
exported so that a stopped export goes on and a changed one is refused. Imports torch: import it lazily.
"""
