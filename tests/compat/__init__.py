"""`make compat`: what we use of vLLM and transformers, held against newer versions by their sources alone."""
