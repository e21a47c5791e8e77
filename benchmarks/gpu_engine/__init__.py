"""Quarry's connector inside vLLM on a CUDA GPU: `python -m benchmarks.gpu_engine`."""
