"""One module a trainer; each has `make(source)`, which checks the options and returns its `Format`."""
