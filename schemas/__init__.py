"""What crosses a border of Quarry: HTTP, disk, and the socket to the engine.

Imports pydantic and pyarrow, nothing of ours; every other package imports this one.
"""
