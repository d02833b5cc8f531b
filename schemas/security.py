"""The settings `kafka.security` and `kafka.signing`: login to Kafka, and keys that sign ops (docs/security.md)."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from halfway.schemas.errors import SettingsError
from halfway.schemas.signing import MIN_KEY_BYTES, Keyring


class SettingsGroup(BaseModel):
    """Base of all settings: refuses unknown names, and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Security(SettingsGroup):
    """The login to Kafka. `ca`, `certificate` and `key` are paths of PEM files."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    user: str | None = None
    password: SecretStr | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    key_password: SecretStr | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.protocol.startswith("SASL") and not (self.sasl_mechanism and self.user and self.password):
            raise ValueError(f"{self.protocol} needs sasl_mechanism, user and password")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")
        for name in ("user", "password", "key_password"):
            value = getattr(self, name)
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if text and re.search(r"[\x00-\x1f\x7f]", text):
                raise ValueError(f"{name} has a line break or another control character")
        return self

    def as_librdkafka_dict(self) -> dict[str, str]:
        """Return the security part of a librdkafka configuration, with secrets in clear text: never log it."""
        options: dict[str, str] = {"security.protocol": self.protocol}
        if self.sasl_mechanism and self.user and self.password:
            options["sasl.mechanism"] = self.sasl_mechanism
            options["sasl.username"] = self.user
            options["sasl.password"] = self.password.get_secret_value()
        if self.ca:
            options["ssl.ca.location"] = str(self.ca)
        if self.certificate and self.key:
            options["ssl.certificate.location"] = str(self.certificate)
            options["ssl.key.location"] = str(self.key)
        if self.key_password:
            options["ssl.key.password"] = self.key_password.get_secret_value()
        return options


def _read_keys(value: object) -> object:
    """Parse keys: `{group: key}` or `{group: [key, …]}`; a string, as from the environment, is JSON."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError('expected {"group": "key"}') from None
    if not isinstance(value, Mapping):
        return value if value is not None else {}
    return {str(group): keys if isinstance(keys, list | tuple) else [keys] for group, keys in value.items()}


Keys = Annotated[Mapping[str, Annotated[tuple[SecretStr, ...], Field(min_length=1)]], BeforeValidator(_read_keys)]


class SigningSettings(SettingsGroup):
    """The keys of producer groups. The ops of a group with a key must be signed.

    While a key is replaced, a group has several. Its first key signs, and each of them verifies.
    """

    keys: Keys = {}
    required: bool = False

    @model_validator(mode="after")
    def _are_long(self) -> Self:
        for group, keys in self.keys.items():
            if any(len(key.get_secret_value().encode()) < MIN_KEY_BYTES for key in keys):
                raise ValueError(f"a key of {group} is shorter than {MIN_KEY_BYTES} bytes: make one with `openssl rand -hex 32`")
        return self

    def keyring(self) -> Keyring | None:
        """Return the keys that sign and verify ops; None if ops are not signed."""
        if not self.keys and not self.required:
            return None
        keys = {group: [key.get_secret_value().encode() for key in of_group] for group, of_group in self.keys.items()}
        return Keyring(keys, required=self.required)

    def fingerprint(self) -> str:
        """Return a value that tells other keys from these, and from which nobody finds a key."""
        secret = repr(sorted((group, [key.get_secret_value() for key in keys]) for group, keys in self.keys.items()))
        return hashlib.pbkdf2_hmac("sha256", f"{self.required} {secret}".encode(), b"halfway-signing", 100_000).hex()

    def keyring_of(self, producer_group: str) -> Keyring | None:
        """Return the keys for a service of this group; None if ops are not signed.

        Raises:
            SettingsError: ops must be signed, and the group has no key.
        """
        keyring = self.keyring()
        if keyring is not None and keyring.required and not keyring.has(producer_group):
            raise SettingsError(f"ops must be signed, and kafka.signing.keys has no key for group {producer_group}")
        return keyring
