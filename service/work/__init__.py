"""One kind of work: tasks are leased, kept while they run, and ended in one way; the worker's supervisor."""
