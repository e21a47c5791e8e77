"""One kind of work: tasks that are leased, kept while they run, and ended in one way; and the worker's process."""
