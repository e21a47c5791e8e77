"""The connector's end of the socket to the service: JSON lines in both directions.

`schemas.receipts` is the protocol.
"""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from schemas.receipts import TO_CONNECTOR, FromConnector, ToConnector, line

logger = logging.getLogger(__name__)


class Link:
    """A connected stream socket with one reading thread. `send` may be called from any thread.

    `on_message` is called on the reading thread. `on_lost` is called once, if the service goes away before
    `close` is called on this side.
    """

    def __init__(
        self, path: Path, on_message: Callable[[ToConnector], None], on_lost: Callable[[], None]
    ) -> None:
        """Connect. Raises OSError if the service is not listening at `path`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._on_message, self._on_lost = on_message, on_lost
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="quarry-link", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def send(self, message: FromConnector) -> None:
        """Send one line. Like the reading thread, this notices when the service has gone."""
        try:
            with self._lock:
                self._socket.sendall(line(message))
        except OSError:
            self._lost()

    def close(self) -> None:
        """End the connection from this side."""
        self._closing.set()
        with suppress(OSError):  # the service may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for text in lines:
                    self._on_message(TO_CONNECTOR.validate_json(text))
        except (OSError, ValueError) as error:
            # Also for a message that is not understood: if the link stopped reading, units would stay
            # unopened.
            logger.warning("the socket to the service broke: %s", error)
        finally:
            self._lost()

    def _lost(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._on_lost()
