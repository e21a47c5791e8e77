"""What the engines of tests are told on the device that they run on; the suites run on a GPU as well."""

import torch

ON_CUDA = torch.cuda.is_available()
MEMORY = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05} if ON_CUDA else {}
"""Engines of several tests share a GPU: none takes most of it, or profiles it while others start and end."""
