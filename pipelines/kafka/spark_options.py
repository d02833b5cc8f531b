"""Spark's options for Kafka (`kafka.…`), from the settings."""

import os

from halfway.schemas.security import Security
from halfway.schemas.settings import KafkaSettings


def spark_options(kafka: KafkaSettings) -> dict[str, str]:
    """Return the connection options of Spark's Kafka source and sink.

    The options hold secrets in clear. Pass them on; never print them.

    Raises:
        SettingsError: no Kafka is configured.
        OSError: a certificate or key file cannot be read.
    """
    return {"kafka.bootstrap.servers": kafka.servers(), **security_options(kafka.security)}


def security_options(security: Security) -> dict[str, str]:
    """Return the security part of `spark_options`."""
    options: dict[str, str] = {"kafka.security.protocol": security.protocol}
    if security.sasl_mechanism and security.user and security.password:
        module = "plain.PlainLoginModule" if security.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        login = f"username={_jaas_quote(security.user)} password={_jaas_quote(security.password.get_secret_value())}"
        options["kafka.sasl.mechanism"] = security.sasl_mechanism
        # Databricks ships Kafka's classes in a package of its own.
        prefix = "kafkashaded." if "DATABRICKS_RUNTIME_VERSION" in os.environ else ""
        options["kafka.sasl.jaas.config"] = f"{prefix}org.apache.kafka.common.security.{module} required {login};"
    if security.ca:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = str(security.ca)
    if security.certificate and security.key:
        options["kafka.ssl.keystore.type"] = "PEM"
        options["kafka.ssl.keystore.certificate.chain"] = security.certificate.read_text()
        options["kafka.ssl.keystore.key"] = security.key.read_text()
    if security.key_password:
        options["kafka.ssl.key.password"] = security.key_password.get_secret_value()
    return options


def _jaas_quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
