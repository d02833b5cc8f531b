"""Loads the settings of a command line: the configuration file, the overrides, the local broker's address."""

from collections.abc import Sequence
from pathlib import Path

from halfway.conf.loader import load_settings, secret_settings
from halfway.pipelines.local.broker import local_broker
from halfway.schemas.errors import SettingsError
from halfway.schemas.settings import ENV_PREFIX, Settings

DEFAULT_CONFIG = Path("conf/local.yaml")


def command_settings(config: Path | None, overrides: Sequence[str] | None) -> Settings:
    """Load the settings that `--config` and `--set` ask for.

    If no Kafka is configured and the local development broker runs, its address is filled in.

    Args:
        config: the settings file; None for `conf/local.yaml` if it exists, or else the built-in defaults.
        overrides: texts like `GROUP.NAME=VALUE`.

    Raises:
        SettingsError: a file, name or value is wrong, an override has no `=`, or it names a secret.
    """
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    pairs = dict(override_pair(text) for text in overrides or ())
    for name in pairs:
        _refuse_secret(name)
    settings = load_settings(config, overrides=pairs)
    if settings.kafka.bootstrap_servers:
        return settings
    broker = local_broker().status()
    if not broker["running"]:
        return settings
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker["bootstrap_servers"]})
    return settings.model_copy(update={"kafka": kafka})


def override_pair(text: str) -> tuple[str, str]:
    """Split `GROUP.NAME=VALUE` at its first `=`.

    Raises:
        SettingsError: there is no name or no `=`.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingsError(f"{text!r} is not GROUP.NAME=VALUE, such as resolution.transactionTimeOut=10s")
    return name.strip(), value


def _refuse_secret(name: str) -> None:
    """Refuse a secret on the command line, which every user of the machine can read."""
    if name.lower() in secret_settings():
        variable = ENV_PREFIX + name.upper().replace(".", "__")
        raise SettingsError(
            f"--set {name}: every user of this machine can read a command line; set {variable} in the environment, or {name} in the "
            "configuration file"
        )
