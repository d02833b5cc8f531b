"""Spark's options for Kafka (`kafka.…`), from the settings."""

import os
from collections.abc import Mapping

from pydantic import SecretStr

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
    if security.protocol.startswith("SASL") and security.sasl_mechanism:
        options["kafka.sasl.mechanism"] = security.sasl_mechanism
        options |= _login(security)
    if security.ca:
        options["kafka.ssl.truststore.type"] = "PEM"
        # As text: executors need no file, and a JVM does not read each path that Python does, such as a volume's.
        options["kafka.ssl.truststore.certificates"] = security.ca.read_text()
    if security.certificate and security.key:
        options["kafka.ssl.keystore.type"] = "PEM"
        options["kafka.ssl.keystore.certificate.chain"] = security.certificate.read_text()
        options["kafka.ssl.keystore.key"] = security.key.read_text()
    if security.key_password:
        options["kafka.ssl.key.password"] = security.key_password.get_secret_value()
    return options


def _login(security: Security) -> dict[str, str]:
    """Return the options of the login. A value that is not set has been refused by the settings."""
    oauth, kerberos = security.oauth, security.kerberos
    # Databricks ships Kafka's classes in a package of its own.
    prefix = "kafkashaded." if "DATABRICKS_RUNTIME_VERSION" in os.environ else ""
    package = f"{prefix}org.apache.kafka.common.security"
    if security.sasl_mechanism == "OAUTHBEARER":
        said = {"clientId": oauth.client_id or "", "clientSecret": _secret(oauth.client_secret)}
        said |= {"scope": oauth.scope} if oauth.scope else {}
        said |= {f"extension_{name}": value for name, value in oauth.extensions.items()}
        if security.ca and (oauth.token_endpoint or "").startswith("https:"):
            said |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(security.ca)}
        return {
            "kafka.sasl.jaas.config": _jaas(f"{package}.oauthbearer.OAuthBearerLoginModule", said),
            "kafka.sasl.login.callback.handler.class": f"{package}.oauthbearer.OAuthBearerLoginCallbackHandler",
            "kafka.sasl.oauthbearer.token.endpoint.url": oauth.token_endpoint or "",
        }
    if security.sasl_mechanism == "GSSAPI":
        said = {"useKeyTab": "true", "storeKey": "true", "keyTab": str(kerberos.keytab), "principal": kerberos.principal or ""}
        login = _jaas("com.sun.security.auth.module.Krb5LoginModule", said)
        return {"kafka.sasl.jaas.config": login, "kafka.sasl.kerberos.service.name": kerberos.service_name}
    module = "plain.PlainLoginModule" if security.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
    said = {"username": security.user or "", "password": _secret(security.password)}
    return {"kafka.sasl.jaas.config": _jaas(f"{package}.{module}", said)}


def _secret(value: SecretStr | None) -> str:
    return "" if value is None else value.get_secret_value()


def _jaas(module: str, options: Mapping[str, str]) -> str:
    return f"{module} required {' '.join(f'{name}={_jaas_quote(value)}' for name, value in options.items())};"


def _jaas_quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
