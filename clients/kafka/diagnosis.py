"""Why Kafka does not let us in, or not do a thing, in words that say what to do: the same for the job, its commands and the client."""

import shlex
import socket
import ssl
from collections.abc import Mapping
from typing import Any

_CONNECT_LIMIT_S = 3.0
WRONG_LOGIN = (
    "Kafka does not take this user with this password: look at kafka.security.user, kafka.security.password and "
    "kafka.security.sasl_mechanism"
)


def missing_right(user: str | None, operation: str, kind: str, name: str, *, is_prefix: bool = False) -> str:
    """Say which right is missing, and the command that gives it.

    Args:
        user: the SASL user; None where the certificate says who we are.
        operation: as Kafka's ACLs call it, `DescribeConfigs`.
        kind: topic, group or cluster.
        name: of the topic or group, or the prefix that all its like have.
        is_prefix: whether it is one.
    """
    where = {"cluster": "--cluster"}.get(kind, f"--{kind} {shlex.quote(name)}") + (" --resource-pattern-type prefixed" if is_prefix else "")
    command = f"--add --allow-principal {shlex.quote(f'User:{user}') if user else 'User:…'} --operation {operation} {where}"
    return f"this user may not {operation} {kind} {name}{'*' if is_prefix else ''}: `kafka-acls.sh --bootstrap-server … {command}`"


def tls_problem(config: Mapping[str, Any]) -> str | None:
    """Find out by a handshake of our own what is wrong between the protocol, the authority and what listens there.

    librdkafka tells neither why a certificate is refused nor that a port without TLS was expected to have it, or the other way round.

    Args:
        config: librdkafka's options.

    Returns:
        What is wrong and what to do; None if it is not that.
    """
    protocol, ca = config.get("security.protocol", "PLAINTEXT"), config.get("ssl.ca.location")
    wants_tls = "SSL" in protocol
    for address in str(config["bootstrap.servers"]).split(","):
        try:
            speaks_tls, refused = _handshake(address.strip(), ca)
        except (OSError, ValueError):
            continue  # Nobody is there: that is another problem.
        if wants_tls and not speaks_tls:
            return f"{address} speaks no TLS, kafka.security.protocol is {protocol}: take another port, or a protocol without SSL"
        if not wants_tls and speaks_tls:
            return f"{address} speaks TLS, kafka.security.protocol is {protocol}: set SSL or SASL_SSL"
        if refused:
            return f"the certificate of {address} is refused ({refused}): look at kafka.security.ca and kafka.bootstrap_servers"
    return None


def _handshake(address: str, ca: str | None) -> tuple[bool, str | None]:
    """Return whether TLS is spoken there, and why the certificate is refused, if it is."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca)
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host.strip("[]")).close()
        except ssl.SSLCertVerificationError as error:
            return True, error.verify_message
        except OSError:
            # SSLError is one: what answers something else, hangs up or says nothing speaks no TLS.
            return False, None
    return True, None
