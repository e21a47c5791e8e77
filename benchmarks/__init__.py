"""The benchmark behind every claim about speed: `python -m benchmarks.bench`."""
