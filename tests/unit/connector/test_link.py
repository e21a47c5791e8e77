"""The connector's end of the socket: who is told when it is of no more use."""

import socket
import threading
from pathlib import Path

from connector.link import Link


def test_a_message_that_is_not_understood_ends_the_link_loudly(tmp_path: Path) -> None:
    lost = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        link = Link(tmp_path / "s", lambda message: None, lost.set)
        service, _ = listening.accept()
        link.start()
        with service:
            service.sendall(b'{"kind": "of-a-later-version"}\n')
            assert lost.wait(30.0)
    link.close()
