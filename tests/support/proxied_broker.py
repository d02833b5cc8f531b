"""A broker whose clients pass through a proxy, which changes some answers."""

import select
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import HOST

_TOGETHER_S = 0.1


class ProxiedBroker(LocalBroker):
    """Its subclasses say which answers are changed, and how."""

    def __init__(self, directory: Path) -> None:
        """Listen for clients, which are forwarded to the broker once it runs."""
        super().__init__(directory)
        self._listener = socket.create_server((HOST, 0))
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        """Start the broker; if that fails, leave nothing behind."""
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the broker, and listen no more."""
        try:
            self.stop()
        finally:
            _close(self._listener)

    def _changed(self, key: int, version: int, request: bytes, response: bytes) -> bytes:
        """Return the response to pass on: `response` itself if it is not changed.

        Args:
            key: the request's API key.
            version: its API version.
            request: without its length; it begins with key, version and correlation id.
            response: what the broker has answered, without its length; it begins with the correlation id.
        """
        raise NotImplementedError

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:
        proxy_port = self._listener.getsockname()[1]
        return super()._own_properties(port, controller_port) | {"advertised.listeners": f"BROKER://{HOST}:{proxy_port}"}

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection((HOST, self._port()))
                except OSError:
                    client.close()
                    continue
                requests: dict[bytes, bytes] = {}  # those without an answer, by correlation id
                for pump in (self._pump_requests, self._pump_responses):
                    threading.Thread(target=pump, args=(client, broker, requests), daemon=True).start()

    def _pump_requests(self, client: socket.socket, broker: socket.socket, requests: dict[bytes, bytes]) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    frame = _frame_of(client)
                    requests[frame[4:8]] = frame
                    broker.sendall(_with_size(frame))
        finally:
            _close(client, broker)

    def _pump_responses(self, client: socket.socket, broker: socket.socket, requests: dict[bytes, bytes]) -> None:
        try:
            with suppress(OSError, EOFError, ValueError):  # ValueError: `select` of a socket that the other thread has closed
                while True:
                    passed, is_changed = b"", False
                    # What follows a changed answer at once comes with it, as from a broker that is busy for a moment.
                    while not passed or (is_changed and select.select([broker], [], [], _TOGETHER_S)[0]):
                        frame = _frame_of(broker)
                        request = requests.pop(frame[:4])
                        changed = self._changed(*struct.unpack(">hh", request[:4]), request, frame)
                        is_changed = changed is not frame
                        passed += _with_size(changed)
                    client.sendall(passed)
        finally:
            _close(client, broker)


def _with_size(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def _frame_of(connection: socket.socket) -> bytes:
    """Return one request or response without its length.

    Raises:
        EOFError: the other side has closed.
    """
    (size,) = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _close(*connections: socket.socket) -> None:
    # Closing alone wakes no thread that accepts or receives.
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
