"""The child process that reads sources, renders chat templates and runs tokenizers: all that others wrote."""
