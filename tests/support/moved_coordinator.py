"""A broker whose clients pass through a proxy, which answers look-ups of offsets as a former coordinator does."""

import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import HOST

_OFFSET_FETCH, _SYNC_GROUP = 9, 14
_NOT_COORDINATOR = 16


class MovedCoordinatorBroker(LocalBroker):
    """It refuses the next look-ups of offsets after `refuse_after_join`, once a member has got its partitions."""

    def __init__(self, directory: Path) -> None:
        """Listen for clients, which are forwarded to the broker once it runs."""
        super().__init__(directory)
        self._listener = socket.create_server((HOST, 0))
        self._lock = threading.Lock()
        self._to_refuse = self._refusals_left = self._refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def refuse_after_join(self, times: int) -> None:
        """Refuse this many look-ups after the next member has got its partitions."""
        with self._lock:
            self._to_refuse, self._refused = times, 0

    def refuses_now(self) -> bool:
        """Return True if some of the look-ups that are to be refused have been, and more will be."""
        with self._lock:
            return self._refused > 0 < self._refusals_left

    def has_refused(self) -> bool:
        """Return True if all look-ups that were to be refused have been."""
        with self._lock:
            return self._to_refuse == self._refusals_left == 0

    def close(self) -> None:
        """Stop the broker, and listen no more."""
        self.stop()
        self._listener.close()

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
        with suppress(OSError, EOFError):
            while True:
                frame = _frame_of(client)
                requests[frame[4:8]] = frame
                broker.sendall(struct.pack(">i", len(frame)) + frame)
        _close(client, broker)

    def _pump_responses(self, client: socket.socket, broker: socket.socket, requests: dict[bytes, bytes]) -> None:
        with suppress(OSError, EOFError):
            while True:
                frame = _frame_of(broker)
                request = requests.pop(frame[:4])
                key, version = struct.unpack(">hh", request[:4])
                if key == _SYNC_GROUP:
                    with self._lock:
                        self._refusals_left, self._to_refuse = self._refusals_left + self._to_refuse, 0
                elif key == _OFFSET_FETCH and self._refuses():
                    frame = frame[:4] + _refusal(version, request)
                client.sendall(struct.pack(">i", len(frame)) + frame)
        _close(client, broker)

    def _refuses(self) -> bool:
        with self._lock:
            if not self._refusals_left:
                return False
            self._refusals_left -= 1
            self._refused += 1
            return True


def _refusal(version: int, request: bytes) -> bytes:
    """Return a response without its correlation id: no partition, and an error for the request as a whole.

    As Kafka's schema OffsetFetchResponse.json has it. A compact length is one more than the number of elements.
    """
    error = struct.pack(">h", _NOT_COORDINATOR)
    no_tags, no_throttle, no_topics, one_group = b"\0", bytes(4), b"\1", b"\2"
    if version < 6:
        raise AssertionError(f"OffsetFetch {version} is not known here")
    if version < 8:
        return no_tags + no_throttle + no_topics + error + no_tags
    (client_id_size,) = struct.unpack(">h", request[8:10])
    group_at = 10 + client_id_size + 2  # after the request's tags and the number of groups
    group = request[group_at : group_at + request[group_at]]
    return no_tags + no_throttle + one_group + group + no_topics + error + no_tags + no_tags


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
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
