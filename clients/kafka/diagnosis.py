"""Explains why Kafka refuses a connection or a request, and what to do. Job, commands and client share it."""

import shlex
import socket
import ssl
import struct
from collections.abc import Collection, Mapping
from typing import Any

_CONNECT_LIMIT_S = 3.0
_CORRELATION_ID = b"half"
_API_VERSIONS = struct.pack(">ihh4sh", 10, 18, 0, _CORRELATION_ID, -1)
"""Kafka's request ApiVersions: its size, key and version, the id that the answer repeats, and no client id."""
WRONG_LOGIN = "Kafka rejects this login: check kafka.security.sasl_mechanism and what it needs (user and password, oauth, or kerberos)"


def missing_right(user: str | None, operation: str, kind: str, name: str, *, is_prefix: bool = False) -> str:
    """Return a message that names the missing right and the command that grants it.

    Args:
        user: the SASL user; None if a certificate identifies the client.
        operation: the operation as Kafka's ACLs name it, such as `DescribeConfigs`.
        kind: topic, group or transactional-id.
        name: its name, or a prefix of several names.
        is_prefix: True if `name` is a prefix.
    """
    where = f"--{kind} {shlex.quote(name)}" + (" --resource-pattern-type prefixed" if is_prefix else "")
    command = f"--add --allow-principal {shlex.quote(f'User:{user}') if user else 'User:…'} --operation {operation} {where}"
    return f"this user may not {operation} {kind} {name}{'*' if is_prefix else ''}: `kafka-acls.sh --bootstrap-server … {command}`"


def missing_topics(topics: Collection[str]) -> str:
    """Return the message for missing topics."""
    what, makes = ("topic", "makes it") if len(topics) == 1 else ("topics", "makes them")
    return f"no {what} {', '.join(topics)}: `halfway topics create` {makes}"


def alter_topic(topic: str, name: str, value: object) -> str:
    """Return what to do about a topic's setting: the command that sets it."""
    return f"set it by `kafka-configs.sh --bootstrap-server … --alter --topic {shlex.quote(topic)} --add-config {name}={value}`"


def tls_problem(config: Mapping[str, Any]) -> str | None:
    """Find a mismatch between the configured protocol, the CA and the brokers, by a TLS handshake of its own.

    librdkafka reports neither why it rejects a certificate nor that TLS is used on one side only.

    Args:
        config: librdkafka's options.

    Returns:
        What is wrong and what to do; None if TLS is not the problem.
    """
    protocol, ca = config.get("security.protocol", "PLAINTEXT"), config.get("ssl.ca.location")
    wants_tls = "SSL" in protocol
    for address in str(config["bootstrap.servers"]).split(","):
        try:
            uses_tls, rejection = _handshake(address.strip(), ca, wants_tls=wants_tls)
        except (OSError, ValueError):
            continue  # No broker answers there, which is another problem.
        if wants_tls and not uses_tls:
            return f"{address} does not use TLS, but kafka.security.protocol is {protocol}: use another port, or a protocol without SSL"
        if not wants_tls and uses_tls:
            return f"{address} uses TLS, but kafka.security.protocol is {protocol}: set SSL or SASL_SSL"
        if rejection:
            return f"the certificate of {address} is rejected ({rejection}): check kafka.security.ca and kafka.bootstrap_servers"
    return None


def _handshake(address: str, ca: str | None, *, wants_tls: bool) -> tuple[bool, str | None]:
    """Return True if `address` uses TLS, and why its certificate is rejected or None.

    Raises:
        OSError: it does not answer; or TLS is wanted, and it hangs up without TLS too, as a proxy does while its
            brokers are away.
    """
    host, _, port = address.rpartition(":")
    place = (host.strip("[]"), int(port))
    context = ssl.create_default_context(cafile=ca)
    with socket.create_connection(place, _CONNECT_LIMIT_S) as connection:
        try:
            context.wrap_socket(connection, server_hostname=place[0]).close()
        except ssl.SSLCertVerificationError as error:
            return True, error.verify_message
        except (ssl.SSLEOFError, ConnectionError):
            pass
        except ssl.SSLError as error:
            # It answers something else than TLS, or an alert, which is TLS: a broker may want a certificate, which this
            # handshake does not show.
            return "ALERT" in (error.reason or ""), None
        else:
            return True, None
    if wants_tls:
        _ask_without_tls(place)
    return False, None


def _ask_without_tls(place: tuple[str, int]) -> None:
    """Ask Kafka for its versions, which it tells before any login.

    Raises:
        OSError: it does not answer that.
    """
    with socket.create_connection(place, _CONNECT_LIMIT_S) as connection, connection.makefile("rb") as answer:
        connection.sendall(_API_VERSIONS)
        if answer.read(8)[4:] != _CORRELATION_ID:  # behind the answer's size
            raise ConnectionError
