"""The dataset's format: everything that reads or writes a dataset's bytes."""
