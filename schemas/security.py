"""The settings `kafka.security` and `kafka.signing`: login to Kafka, and keys that sign records (docs/security.md)."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from halfway.schemas.errors import SettingsError
from halfway.schemas.signing import MIN_KEY_BYTES, Keyring
from halfway.schemas.yaml_text import read_yaml


class SettingsGroup(BaseModel):
    """Base of all settings: refuses unknown names, and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def parse_text(expected: str) -> Callable[[object], object]:
    """Return a parser for a setting with several values: a string, as from the environment, is JSON, and None is empty.

    A text that says nothing is refused, such as a variable whose secret or template value is not there: messages would
    go elsewhere, or nothing would be verified.

    Args:
        expected: an example, for the error.
    """

    def parse(value: object) -> object:
        if isinstance(value, str):
            try:
                value = read_yaml(value)
            except yaml.YAMLError:
                raise ValueError(f"expected {expected}") from None
            if value is None:
                raise ValueError("it is blank: take it away, or set {} or [] if there are to be none")
            if not isinstance(value, dict | list):
                raise ValueError(f"expected {expected}")
        return value if value is not None else {}

    return parse


by_group = parse_text('{"group": "value"}')


class OAuthSettings(SettingsGroup):
    """The login with a token that an identity provider issues (OpenID Connect, client credentials)."""

    token_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    client_id: str | None = None
    client_secret: SecretStr | None = None
    scope: str | None = None
    extensions: Annotated[Mapping[str, str], BeforeValidator(parse_text('{"name": "value"}'))] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _extensions_are_names(self) -> Self:
        # librdkafka separates them by commas, and Kafka's protocol by control characters.
        named = re.compile(r"[A-Za-z]+=[^,\x00-\x1f\x7f]+")
        if not all(named.fullmatch(f"{name}={value}") for name, value in self.extensions.items()):
            raise ValueError("the names of extensions are letters, and their values have no comma and no control characters")
        return self


class KerberosSettings(SettingsGroup):
    """The login with Kerberos (GSSAPI): a principal, and the file with its keys."""

    principal: str | None = None
    keytab: Path | None = None
    service_name: Annotated[str, Field(min_length=1)] = "kafka"


class Security(SettingsGroup):
    """The login to Kafka. `ca`, `certificate` and `key` are paths of PEM files."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None = None
    user: str | None = None
    password: SecretStr | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    key_password: SecretStr | None = None
    oauth: OAuthSettings = OAuthSettings()
    kerberos: KerberosSettings = KerberosSettings()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.protocol.startswith("SASL"):
            self._verify_login()
        elif self.sasl_mechanism or self.user or self.password:
            raise ValueError(
                f"{self.protocol} has no login, so that sasl_mechanism, user and password would not be used: set protocol to SASL_SSL, or "
                "remove them"
            )
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")
        oauth, kerberos = self.oauth, self.kerberos
        texts = {
            **{name: getattr(self, name) for name in ("user", "password", "key_password")},
            **{f"oauth.{name}": getattr(oauth, name) for name in ("client_id", "client_secret", "scope")},
            **{f"kerberos.{name}": getattr(kerberos, name) for name in ("principal", "service_name")},
        }
        for name, value in texts.items():
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if text and re.search(r"[\x00-\x1f\x7f]", text):
                raise ValueError(f"{name} has a line break or another control character")
        return self

    def _verify_login(self) -> None:
        oauth, kerberos = self.oauth, self.kerberos
        if self.sasl_mechanism == "OAUTHBEARER":
            if not (oauth.token_endpoint and oauth.client_id and oauth.client_secret):
                raise ValueError("OAUTHBEARER needs oauth.token_endpoint, oauth.client_id and oauth.client_secret")
        elif self.sasl_mechanism == "GSSAPI":
            if not (kerberos.principal and kerberos.keytab):
                raise ValueError("GSSAPI needs kerberos.principal and kerberos.keytab")
        elif not (self.sasl_mechanism and self.user and self.password):
            raise ValueError(f"{self.protocol} needs sasl_mechanism, user and password")

    @property
    def login(self) -> str | None:
        """Return the user that errors about rights name; None if a certificate, or nothing, says who the client is."""
        by_mechanism = {"OAUTHBEARER": self.oauth.client_id, "GSSAPI": self.kerberos.principal}
        return by_mechanism.get(self.sasl_mechanism or "", self.user)

    def as_librdkafka_dict(self) -> dict[str, str]:
        """Return the security part of a librdkafka configuration, with secrets in clear text: never log it."""
        options: dict[str, str] = {"security.protocol": self.protocol, **self._login_for_librdkafka()}
        if self.ca:
            options["ssl.ca.location"] = str(self.ca)
        if self.certificate and self.key:
            options["ssl.certificate.location"] = str(self.certificate)
            options["ssl.key.location"] = str(self.key)
        if self.key_password:
            options["ssl.key.password"] = self.key_password.get_secret_value()
        return options

    def _login_for_librdkafka(self) -> dict[str, str]:
        oauth, kerberos = self.oauth, self.kerberos
        if self.sasl_mechanism == "OAUTHBEARER" and oauth.token_endpoint and oauth.client_id and oauth.client_secret:
            options = {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": oauth.token_endpoint,
                "sasl.oauthbearer.client.id": oauth.client_id,
                "sasl.oauthbearer.client.secret": oauth.client_secret.get_secret_value(),
            }
            if oauth.scope:
                options["sasl.oauthbearer.scope"] = oauth.scope
            if oauth.extensions:
                options["sasl.oauthbearer.extensions"] = ",".join(f"{name}={value}" for name, value in oauth.extensions.items())
            if self.ca:
                options["https.ca.location"] = str(self.ca)
        elif self.sasl_mechanism == "GSSAPI" and kerberos.principal and kerberos.keytab:
            options = {
                "sasl.kerberos.principal": kerberos.principal,
                "sasl.kerberos.keytab": str(kerberos.keytab),
                "sasl.kerberos.service.name": kerberos.service_name,
            }
        elif self.sasl_mechanism and self.user and self.password:
            options = {"sasl.username": self.user, "sasl.password": self.password.get_secret_value()}
        else:
            return {}
        return {"sasl.mechanism": self.sasl_mechanism, **options}


def _read_keys(value: object) -> object:
    """Parse keys: `{group: key}` or `{group: [key, …]}`."""
    value = by_group(value)
    if not isinstance(value, Mapping):
        return value
    if not all(isinstance(group, str) for group in value):
        raise ValueError("YAML reads a name such as no, 7 or 1.5 as something else: put it in quotes")
    return {group: keys if isinstance(keys, list | tuple) else [keys] for group, keys in value.items()}


def _as_list(value: object) -> object:
    """Read one key, or several: a string that is a JSON list, as from the environment, holds several."""
    if not isinstance(value, str) or not value.strip() or value.lstrip().startswith("["):
        value = parse_text('a key or ["new key", "old key"]')(value)
    return value if isinstance(value, list | tuple) else [value] if value else []


Keys = Annotated[Mapping[str, Annotated[tuple[SecretStr, ...], Field(min_length=1)]], BeforeValidator(_read_keys)]
JobKeys = Annotated[tuple[SecretStr, ...], BeforeValidator(_as_list)]
TopicsOfGroups = Annotated[Mapping[str, tuple[str, ...]], BeforeValidator(_read_keys)]


class SigningSettings(SettingsGroup):
    """The keys of producer groups and of the job. The records of a group with a key must be signed.

    While a key is replaced, a group has several. Its first key signs, and each of them verifies.
    """

    cluster: str | None = None
    keys: Keys = {}
    job_keys: JobKeys = ()
    topics: TopicsOfGroups = {}
    required: bool = False
    accept_unsigned: bool = False

    @model_validator(mode="after")
    def _are_consistent(self) -> Self:
        for name, keys in (("keys", chain.from_iterable(self.keys.values())), ("job_keys", self.job_keys)):
            if any(len(key.get_secret_value().encode()) < MIN_KEY_BYTES for key in keys):
                raise ValueError(f"one of {name} is shorter than {MIN_KEY_BYTES} bytes: make one with `openssl rand -hex 32`")
        if self.required and self.accept_unsigned:
            raise ValueError("required refuses what accept_unsigned accepts: set one of them")
        if self._is_on() and not self.cluster:
            raise ValueError("cluster is missing: signed records name their Kafka, so that a copy in another one does not count")
        return self

    def _is_on(self) -> bool:
        return bool(self.keys or self.job_keys or self.topics or self.required)

    def keyring(self) -> Keyring | None:
        """Return the keys that sign and verify records; None if records are not signed."""
        if not self._is_on():
            return None
        keys = {group: _bytes_of(of_group) for group, of_group in self.keys.items()}
        return Keyring(
            keys,
            required=self.required,
            cluster=self.cluster or "",
            job_keys=_bytes_of(self.job_keys),
            topics=self.topics,
            accept_unsigned=self.accept_unsigned,
        )

    def keyring_of_job(self) -> Keyring | None:
        """Return the keys for the job; None if records are not signed.

        Raises:
            SettingsError: the services sign, and the job has no key of its own.
        """
        if self._is_on() and not self.job_keys:
            raise SettingsError(
                "kafka.signing has no job_keys, so that anyone who can write the half topic can forge time: make one with "
                "`openssl rand -hex 32`, and give it to nobody but the job"
            )
        return self.keyring()

    def fingerprint(self) -> str:
        """Return a value that tells other settings from these, and from which nobody finds a key."""
        secret = repr(
            (
                sorted((group, [key.get_secret_value() for key in keys]) for group, keys in self.keys.items()),
                [key.get_secret_value() for key in self.job_keys],
                sorted((group, sorted(topics)) for group, topics in self.topics.items()),
                self.cluster,
                self.accept_unsigned,
            )
        )
        return hashlib.pbkdf2_hmac("sha256", f"{self.required} {secret}".encode(), b"halfway-signing", 100_000).hex()

    def keyring_of(self, producer_group: str) -> Keyring | None:
        """Return the keys for a service of this group; None if records are not signed.

        Raises:
            SettingsError: records must be signed, and the group has no key.
        """
        keyring = self.keyring()
        if keyring is not None and keyring.required and not keyring.has(producer_group):
            raise SettingsError(f"records must be signed, and kafka.signing.keys has no key for group {producer_group}")
        return keyring


def _bytes_of(keys: Iterable[SecretStr]) -> list[bytes]:
    return [key.get_secret_value().encode() for key in keys]
