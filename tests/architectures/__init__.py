"""The architecture matrix: a tiny model of each, captured by the real engine, held against transformers.

`recipes` says how each model is made, `measure` runs one of them as a job, `matrix` runs all that were not
measured yet and writes `docs/architectures.json`, `table` writes `docs/architectures.md` from it.
"""
