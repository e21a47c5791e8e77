"""Writes a dataset in a drafter trainer's format, with every tensor where and how that trainer reads it.

Data flow: dataset -> source -> format -> sealed files. `run` drives the export; `record` records what is
being exported, so that an interrupted export continues and a changed one is refused. Imports torch: import it
lazily.
"""
