"""Serves the metrics of a job or a relay to Prometheus."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from halfway.schemas.errors import SetupError
from halfway.schemas.settings import MetricsSettings


@contextmanager
def served(metrics: Collector, settings: MetricsSettings) -> Iterator[None]:
    """Serve `metrics` at `http://<host>:<port>/metrics` until the block ends.

    Raises:
        SetupError: the port is taken, or the host is not an address of this machine.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(settings.port, settings.host, registry)
    except OSError as error:
        why = "is taken by another process" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror or error})"
        raise SetupError(
            f"metrics.port {settings.port} of {settings.host} {why}: end that process, or set metrics.port to a free one (0: no metrics)"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
