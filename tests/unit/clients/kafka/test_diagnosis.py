"""Why Kafka refuses a connection, as a TLS handshake of our own finds it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from halfway.clients.kafka.diagnosis import tls_problem
from tests.support.secure_broker import Authority

HOST = "127.0.0.1"


@contextmanager
def listening(authority: Authority, version: ssl.TLSVersion | None) -> Iterator[str]:
    """Serve TLS of one version to who has a certificate, or with None something else than TLS. Yield the address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.load_cert_chain(authority.store("broker", HOST)[0])
    context.verify_mode = ssl.CERT_REQUIRED
    if version is not None:
        context.minimum_version = context.maximum_version = version
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"\0\0\0\5not TLS") if version is None else context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{HOST}:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_broker_that_wants_a_certificate_does_use_tls(version: ssl.TLSVersion, tmp_path: Path) -> None:
    """TLS 1.2 ends the handshake of who shows none. The client itself shows its own, and must not be refused for it."""
    authority = Authority(tmp_path)
    with listening(authority, version) as address:
        assert tls_problem({"bootstrap.servers": address, "security.protocol": "SSL", "ssl.ca.location": str(authority.ca)}) is None


def test_a_proxy_that_hangs_up_while_its_brokers_are_away_is_not_told_as_one_without_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with socket.create_server((HOST, 0)) as server:

        def hang_up() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"{HOST}:{server.getsockname()[1]}"
        assert tls_problem({"bootstrap.servers": address, "security.protocol": "SSL", "ssl.ca.location": str(authority.ca)}) is None


def test_a_broker_without_tls_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with listening(authority, None) as address:
        told = tls_problem({"bootstrap.servers": address, "security.protocol": "SSL", "ssl.ca.location": str(authority.ca)})
    assert told is not None
    assert "does not use TLS" in told
