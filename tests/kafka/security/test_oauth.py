"""OAUTHBEARER with a real token endpoint: the job, its Spark, its commands and a client log in with tokens."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfway import TransactionProducer
from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.admin import admin_client, partition_counts
from halfway.pipelines.kafka.spark_options import spark_options
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.storage.delta_tables import read_table
from halfway.schemas.errors import KafkaUnavailableError
from halfway.schemas.settings import Settings
from halfway.schemas.tables import Table
from tests.support.client_world import COMMIT, UNKNOWN, Listener
from tests.support.job_world import SMALL_JOB
from tests.support.secure_world import redacted
from tests.support.token_endpoint import TokenBroker, TokenEndpoint
from tests.support.waiting import until

CLIENT, SECRET = "halfway-job", 's3cret"of; th\\e job'
TELLING = b"s3cret"
BROKER = "the-broker"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[TokenEndpoint]:
    serving = TokenEndpoint({CLIENT: SECRET, BROKER: "s3cret-of-the-broker"})
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def token_broker(endpoint: TokenEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenBroker]:
    running = TokenBroker(tmp_path_factory.mktemp("oauth"), endpoint, BROKER)
    with pytest.MonkeyPatch.context() as patch:
        # Brokers ask only those endpoints that they are allowed to.
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={endpoint.url}/token,{endpoint.url}/keys"
        patch.setenv("KAFKA_HEAP_OPTS", f"{os.environ.get('KAFKA_HEAP_OPTS', '')} {allowed}")
        running.start()
    yield running
    running.stop()


def settings_of(broker: TokenBroker, endpoint: TokenEndpoint, folder: Path, **changed: object) -> Settings:
    oauth = {"token_endpoint": f"{endpoint.url}/token", "client_id": CLIENT, "client_secret": SECRET, "scope": "halfway"}
    own = {
        **SMALL_JOB,
        "kafka.bootstrap_servers": broker.status()["bootstrap_servers"],
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.security.sasl_mechanism": "OAUTHBEARER",
        **{f"kafka.security.oauth.{name}": value for name, value in oauth.items()},
        **{f"storage.{name}": str(folder / name) for name in ("warehouse", "checkpoint")},
        **{f"resolution.{name}": 1 for name in ("transactionTimeOut", "transactionCheckInterval")},
        "resolution.tick_interval": 100,
        **changed,
    }
    return load_settings(environ={}, overrides=own)


@pytest.mark.timeout(300)
def test_every_part_logs_in_with_tokens_and_tells_nobody_its_secret(
    token_broker: TokenBroker, endpoint: TokenEndpoint, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "halfway")
    settings = settings_of(token_broker, endpoint, tmp_path, **{"kafka.security.oauth.extensions": {"traceId": "a b"}})
    create_topics(settings, 1)
    listener = Listener(lambda _, arg: arg, lambda _: COMMIT)
    with TransactionProducer(settings.kafka, "shop", listener) as producer:
        for name, state in (("at-once", COMMIT), ("asked", UNKNOWN)):
            producer.send_in_transaction("orders", b"body", transaction_id=name, arg=state)
        ResolveJob(settings).run(lambda: spark)
        until(lambda: len(listener.checked) == 1, "the check")
    issued = len(endpoint.issued)
    ResolveJob(settings).run(lambda: spark)
    assert {row.transaction_id for row in read_table(spark, settings.storage, Table.MESSAGES).collect()} == {"at-once", "asked"}
    new = {(each["client_id"], each["scope"]) for each in endpoint.issued[issued:]}
    assert (CLIENT, "halfway") in new, "a new run has tokens of its own"
    assert new <= {(CLIENT, "halfway"), (BROKER, "")}
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name, content in {**files, "the log": caplog.text.encode()}.items() if TELLING in content} == set()


def test_spark_redacts_the_client_secret(token_broker: TokenBroker, endpoint: TokenEndpoint, spark: SparkSession, tmp_path: Path) -> None:
    options = spark_options(settings_of(token_broker, endpoint, tmp_path).kafka)
    assert any(TELLING.decode() in value for value in options.values())
    assert not any(TELLING.decode() in value for value in redacted(spark, options).values())


def test_a_client_outlives_its_token(token_broker: TokenBroker, endpoint: TokenEndpoint, tmp_path: Path) -> None:
    client = admin_client(settings_of(token_broker, endpoint, tmp_path).kafka)
    assert partition_counts(client, ["none"]) == {}
    issued = len(endpoint.issued)
    until(lambda: len(endpoint.issued) > issued, "a second token", limit_s=60)
    assert partition_counts(client, ["none"]) == {}


def test_a_wrong_secret_is_told_in_one_line(token_broker: TokenBroker, endpoint: TokenEndpoint, tmp_path: Path) -> None:
    settings = settings_of(token_broker, endpoint, tmp_path, **{"kafka.security.oauth.client_secret": "wr0ng"})
    with pytest.raises(KafkaUnavailableError) as caught:
        partition_counts(admin_client(settings.kafka), ["none"])
    assert "wr0ng" not in str(caught.value)
    assert "kafka.security" in str(caught.value)
