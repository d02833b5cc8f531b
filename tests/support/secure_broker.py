"""A Kafka broker with TLS, passwords and ACLs, its certificate authority, and listeners that are misconfigured."""

import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from halfway.pipelines.kafka.admin import Admin
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import HOST, free_port
from tests.support.waiting import until

ADMIN = "admin"
_BROKER_NAME = "halfway-broker"
_ITERATIONS = 4096


class Authority:
    """A certificate authority with its files in `folder`; `ca` is its own certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "halfway-tests")])
        certificate = self._builder(self._name, self._key, expired=False).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def store(self, name: str, *hosts: str, expired: bool = False) -> tuple[Path, Path]:
        """Make a key and a certificate for `hosts`. Return Kafka's PEM key store, and the file of the key alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        others = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        certificate = self._builder(subject, key, expired).add_extension(others, critical=False).sign(self._key, hashes.SHA256())
        clear = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        store, own = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        for path, content in ((store, clear + _pem(certificate)), (own, clear)):
            path.touch(0o600)
            path.write_bytes(content)
        return store, own

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, expired: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=2))
        return builder.not_valid_after(now + timedelta(days=-1 if expired else 1))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(host)) if re.fullmatch(r"[0-9.]+", host) else x509.DNSName(host)


class Right(NamedTuple):
    """One right of an ACL: a kind of resource, its name or prefix, and an operation."""

    kind: ResourceType
    name: str
    operation: AclOperation
    is_prefix: bool = False


class SecureBroker(LocalBroker):
    """A local broker with SASL_SSL (SCRAM-SHA-512), and ACLs that grant only what `allow` grants.

    More listeners are misconfigured on purpose: `expired` has an expired certificate, `elsewhere` the certificate of
    another host, and `plain` no TLS.
    """

    WRONG = ("expired", "elsewhere", "plain")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._authority = Authority(self.directory)
        self.ca = self._authority.ca
        self.client_store, self.client_key = self._authority.store("client", HOST)
        self._stores = {
            "broker": self._authority.store(_BROKER_NAME, HOST, "localhost")[0],
            "expired": self._authority.store("expired", HOST, expired=True)[0],
            "elsewhere": self._authority.store("elsewhere", "elsewhere.example")[0],
        }
        self._passwords = {ADMIN: secrets.token_hex(16)}
        self._ports: dict[str, int] = {}

    def address(self, listener: str) -> str:
        """Return the address of a misconfigured listener."""
        return f"{HOST}:{self._ports[listener]}"

    def admin(self) -> Admin:
        """Return an admin client that may do everything."""
        return Admin({"bootstrap.servers": f"{HOST}:{self._port()}", **self._client_options()})

    def login_settings(self, user: str) -> dict[str, object]:
        """Return the settings that name this broker and `user`."""
        return {"kafka.bootstrap_servers": self.status()["bootstrap_servers"], **self.security_of(user)}

    def security_of(self, user: str) -> dict[str, object]:
        """Return the settings with which `user` logs in."""
        own = {
            "protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "user": user,
            "password": self._passwords[user],
            "ca": str(self.ca),
        }
        return {f"kafka.security.{name}": value for name, value in own.items()}

    def add_user(self, user: str, password: str) -> None:
        """Create a user without rights."""
        client, info = self.admin(), ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
        for done in client.alter_user_scram_credentials([UserScramCredentialUpsertion(user, info, password.encode())]).values():
            done.result()
        self._passwords[user] = password

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        """Grant rights to `user`, from any host."""
        client, bindings = self.admin(), [_binding(user, right) for right in rights]
        for done in client.create_acls(bindings).values():
            done.result()
        for binding in bindings:
            _until_known(client, binding, 1)

    def forbid(self, user: str, right: Right) -> None:
        """Revoke one right of `user`."""
        client, binding = self.admin(), _binding(user, right)
        for done in client.delete_acls([_exactly(binding)]).values():
            assert len(done.result()) == 1, f"{right} was not granted"
        _until_known(client, binding, 0)

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:
        self._ports = {listener: free_port(but=port) for listener in self.WRONG}
        plain = super()._own_properties(port, controller_port)
        listeners = [plain["listeners"], *(f"{name.upper()}://{HOST}:{number}" for name, number in self._ports.items())]
        as_admin = f'username="{ADMIN}" password="{self._passwords[ADMIN]}"'
        login = f"org.apache.kafka.common.security.scram.ScramLoginModule required {as_admin};"
        protocols = {"BROKER": "SASL_SSL", "CONTROLLER": "SSL", "EXPIRED": "SSL", "ELSEWHERE": "SSL", "PLAIN": "PLAINTEXT"}
        own = {
            "listeners": ",".join(listeners),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.broker.scram-sha-512.sasl.jaas.config": login,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._stores["broker"]),
            "listener.name.expired.ssl.keystore.location": str(self._stores["expired"]),
            "listener.name.elsewhere.ssl.keystore.location": str(self._stores["elsewhere"]),
            # The broker logs in to its controller, which is itself, with its own certificate.
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:CN={_BROKER_NAME}",
        }
        del plain["advertised.listeners"]
        return plain | own

    def _format_options(self) -> list[str]:
        return ["--add-scram", f"SCRAM-SHA-512=[name={ADMIN},password={self._passwords[ADMIN]}]"]

    def _client_options(self) -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": ADMIN,
            "sasl.password": self._passwords[ADMIN],
            "ssl.ca.location": str(self.ca),
        }


def _binding(user: str, right: Right) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if right.is_prefix else ResourcePatternType.LITERAL
    return AclBinding(right.kind, right.name, pattern, f"User:{user}", "*", right.operation, AclPermissionType.ALLOW)


def _exactly(binding: AclBinding) -> AclBindingFilter:
    where = (binding.restype, binding.name, binding.resource_pattern_type)
    return AclBindingFilter(*where, binding.principal, "*", binding.operation, AclPermissionType.ALLOW)


def _until_known(client: Admin, binding: AclBinding, count: int) -> None:
    """Wait until the broker's authorizer knows a change that the controller has stored."""
    until(lambda: len(client.describe_acls(_exactly(binding)).result()) == count, f"{binding} is there {count} times")
