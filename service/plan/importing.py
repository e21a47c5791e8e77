"""The lock of what imports transformers, whose modules import each other in circles and on demand.

Two threads that import them at once see halves of them.
"""

import threading

IMPORTING = threading.RLock()
"""Held over an import of transformers, and over a call that makes it import more."""
