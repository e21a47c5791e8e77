"""The demo, its small target model, and its conversations.

`conversations.jsonl` asks about Python's standard library; the answers are docstrings of CPython (PSF
licence).
"""
