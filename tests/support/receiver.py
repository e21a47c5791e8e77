"""Where webhooks go in tests: an HTTPS server of this machine with a certificate of its own."""

import datetime
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME = "hooks.example"
"""What the certificate is of, and the tests' resolver knows."""


class Receiver(ThreadingHTTPServer):
    """Keeps what comes, and answers with the next of `answers`; with 204 where none is left.

    An answer is a status, or a text that is sent as it is, a byte each tenth of a second.
    """

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.answers: list[int | str] = []
        self.retry_after = "0"
        self.came: list[tuple[dict[str, str], bytes]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"https://{NAME}:{self.server_port}/hook"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append(({name.lower(): value for name, value in self.headers.items()}, body))
        answer = self.server.answers.pop(0) if self.server.answers else 204
        if isinstance(answer, int):
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            self.send_header("Retry-After", self.server.retry_after)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        for byte in answer.encode():
            if self.server.ended.wait(0.1):
                return
            self.wfile.write(bytes([byte]))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving(folder: Path) -> Iterator[tuple[Receiver, Path]]:
    """Serve until the block ends; yield the server and its certificate."""
    certificate = _certificate(folder / "certificate.pem")
    with Receiver(certificate) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server, certificate
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def _certificate(path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
