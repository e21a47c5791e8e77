"""The HTTP side: routes, problem documents, event streams, and `quarry serve` with its worker beside it."""
