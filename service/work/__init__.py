"""One kind of work: tasks that the store leases, kept while they run, and ended in one way."""
