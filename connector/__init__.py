"""Runs inside vLLM's processes: drains the cache-only layer into sealed shards. Imports schemas only."""
