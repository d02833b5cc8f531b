"""No secret appears in logs, Spark's UI, event log, command lines, checkpoint or tables, also not after a failure."""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from confluent_kafka.admin import AclOperation, ResourceType
from pyspark.sql import SparkSession

from halfway import TransactionProducer
from halfway.conf.loader import conf_file, load_settings
from halfway.pipelines.kafka.spark_options import spark_options
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.processes import HOST, free_port
from halfway.schemas.settings import Settings
from tests.support.client_world import COMMIT, GROUP, UNKNOWN, Listener
from tests.support.commands import halfway_command, run_halfway
from tests.support.delta_rows import delta_rows
from tests.support.paths import ROOT
from tests.support.secure_broker import ADMIN, Right, SecureBroker
from tests.support.secure_world import USERS, redacted, rights_of
from tests.support.waiting import until

PASSWORD, SIGNING_KEY = "tell-nobody-this-password", "tell-nobody-this-key-of-32-bytes-or-more"
JOB_KEY = "tell-nobody-that-key-of-the-job-of-32-bytes"
KEY_PASSWORD = "tell-nobody-the-password-of-the-key"
OPENSSL = shutil.which("openssl")
LIMIT_S = 120


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    running = SecureBroker(tmp_path_factory.mktemp("guarded"))
    running.start()
    try:
        for part in ("job", "client"):
            running.add_user(USERS[part], PASSWORD)
            running.allow(USERS[part], rights_of(part))
        create_topics(load_settings(environ={}, overrides=running.login_settings(ADMIN)), 1)
        yield running
    finally:
        running.stop()


def key_of(broker: SecureBroker) -> Path:
    """Return the file of the client's private key: encrypted, if this machine can encrypt it as Java reads it."""
    if OPENSSL is None:
        return broker.client_key
    path = broker.client_key.with_name("encrypted.key")
    command = [OPENSSL, "pkcs8", "-topk8", "-v1", "PBE-SHA1-3DES", "-passout", f"pass:{KEY_PASSWORD}"]
    subprocess.run([*command, "-in", str(broker.client_key), "-out", str(path)], check=True)
    return path


class Job:
    """`halfway resolve` with Spark's UI, event log and full log, and with a private key in its settings."""

    def __init__(self, broker: SecureBroker, folder: Path) -> None:
        self.ui, self.folder, self.log = f"http://{HOST}:{free_port()}", folder, folder / "job.log"
        (folder / "events").mkdir()
        port = self.ui.rpartition(":")[2]
        own = {"eventLog.enabled": "true", "eventLog.dir": f"file://{folder}/events", "eventLog.compress": "false", "ui.port": port}
        (folder / "spark-defaults.conf").write_text("".join(f"spark.{name} {value}\n" for name, value in own.items()))
        security = {name.removeprefix("kafka.security."): value for name, value in broker.security_of(USERS["job"]).items()}
        security |= {"certificate": str(broker.client_store), "key": str(key_of(broker))}
        del security["password"]
        content = {
            "kafka": {"bootstrap_servers": broker.status()["bootstrap_servers"], "security": security},
            "storage": {"warehouse": str(folder / "warehouse"), "checkpoint": str(folder / "checkpoint")},
            "state": {"buckets": 2, "shuffle_partitions": 1},
            "resolution": {"transactionTimeOut": 1, "transactionCheckInterval": "1h"},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(content))
        environ = {
            **os.environ,
            "SPARK_CONF_DIR": str(folder),
            "HALFWAY_SPARK_LOG": "INFO",
            "HALFWAY__KAFKA__SECURITY__PASSWORD": PASSWORD,
            **({"HALFWAY__KAFKA__SECURITY__KEY_PASSWORD": KEY_PASSWORD} if OPENSSL else {}),
            "HALFWAY__KAFKA__SIGNING__CLUSTER": "secure",
            "HALFWAY__KAFKA__SIGNING__KEYS": json.dumps({GROUP: SIGNING_KEY}),
            "HALFWAY__KAFKA__SIGNING__JOB_KEYS": JOB_KEY,
        }
        command = halfway_command("resolve", "--ui", "--config", str(folder / "job.yaml"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )

    def rows(self, table: str) -> str:
        return str(delta_rows(self.folder / "warehouse" / table))

    def pages(self) -> dict[str, str]:
        """Return the pages and the REST answers of Spark's UI."""
        [app] = json.loads(self._page("/api/v1/applications"))
        api = f"/api/v1/applications/{app['id']}"
        executions = json.loads(self._page(f"{api}/sql?details=true&planDescription=true&length=1000"))
        assert executions
        paths = [
            "/environment/",
            "/SQL/",
            "/StreamingQuery/",
            "/jobs/",
            f"{api}/environment",
            f"{api}/sql?details=true&planDescription=true",
        ]
        paths += [f"/SQL/execution/?id={execution['id']}" for execution in executions[-20:]]
        return {path: self._page(path) for path in paths}

    def _page(self, path: str) -> str:
        with urllib.request.urlopen(self.ui + path, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def command_lines(self) -> str:
        """Return the command lines of the driver, its JVM and its workers."""
        done = subprocess.run(["ps", "-ww", "-s", str(self.process.pid), "-o", "args="], capture_output=True, text=True, check=True)
        return done.stdout

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def job(broker: SecureBroker, tmp_path: Path) -> Iterator[Job]:
    running = Job(broker, tmp_path)
    yield running
    running.kill()


def secrets_of(broker: SecureBroker) -> dict[str, str]:
    own = {"password": PASSWORD, "signing key": SIGNING_KEY, "job's key": JOB_KEY, "key password": KEY_PASSWORD}
    return own | {f"private key in {path.name}": path.read_text().splitlines()[1] for path in (broker.client_key, key_of(broker))}


def leaks(broker: SecureBroker, places: dict[str, str]) -> list[tuple[str, str]]:
    return [(what, place) for what, secret in secrets_of(broker).items() for place, text in places.items() if secret in text]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_no_secret_appears_while_the_job_runs_or_after_it_has_failed(broker: SecureBroker, job: Job) -> None:
    keys = {"kafka.signing.cluster": "secure", "kafka.signing.keys": {GROUP: SIGNING_KEY}}
    settings: Settings = load_settings(environ={}, overrides={**broker.login_settings(USERS["client"]), **keys})
    listener = Listener(lambda _, arg: arg)
    with TransactionProducer(settings.kafka, GROUP, listener) as producer:
        producer.send_in_transaction("orders", b"body", transaction_id="at-once", arg=COMMIT)
        producer.send_in_transaction("orders", b"body", transaction_id="asked", arg=UNKNOWN)
        until(lambda: "asked" in job.rows("messages") or job.process.poll() is not None, "both messages in the table", LIMIT_S)
    assert job.process.poll() is None, job.log.read_text()[-3000:]
    seen = {"ps": job.command_lines(), **job.pages()}
    assert "org.apache.spark.deploy.SparkSubmit" in seen["ps"]
    assert leaks(broker, seen) == []
    broker.forbid(USERS["job"], Right(ResourceType.TOPIC, "transactions.half", AclOperation.READ))
    assert job.process.wait(LIMIT_S) == 1
    log = job.log.read_text()
    assert log.strip().splitlines()[-1].startswith("error: this user may not Read topic transactions.half: `kafka-acls.sh")
    assert "TopicAuthorizationException" in log
    tables = {table: job.rows(table) for table in ("messages", "quarantine")}
    files = {str(path): path.read_bytes().decode(errors="replace") for path in job.folder.rglob("*") if path.is_file()}
    [events] = [text for name, text in files.items() if "/events/" in name and "SparkListenerEnvironmentUpdate" in text]
    assert "SparkListenerSQLExecutionStart" in events
    assert leaks(broker, {**files, **tables}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("kafka.security.password", "kafka.security.key_password", "kafka.security.oauth.client_secret"),
        *("Kafka.Signing.KEYS", "kafka.signing.job_keys"),
    ],
)
def test_a_secret_on_the_command_line_is_refused(name: str) -> None:
    done = run_halfway("topics", "create", "--set", f"{name}={PASSWORD}", limit_s=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"HALFWAY__{name.upper().replace('.', '__')} in the environment, or {name} in the configuration file" in done.stderr
    assert PASSWORD not in done.stderr


def test_spark_redacts_the_secret_options(spark: SparkSession, broker: SecureBroker) -> None:
    own = {
        **broker.login_settings(USERS["job"]),
        "kafka.security.certificate": str(broker.client_store),
        "kafka.security.key": str(broker.client_key),
    }
    options = spark_options(load_settings(environ={}, overrides={**own, "kafka.security.key_password": "hush"}).kafka)
    clear = {
        "kafka.bootstrap.servers",
        "kafka.security.protocol",
        "kafka.sasl.mechanism",
        "kafka.ssl.truststore.type",
        "kafka.ssl.truststore.certificates",
        "kafka.ssl.keystore.type",
    }
    shown = redacted(spark, options)
    assert {name for name in options if shown[name] == options[name]} == clear
    assert "redacted" in shown["kafka.ssl.keystore.key"]


def test_clusters_redact_the_same_options(spark: SparkSession) -> None:
    [line] = re.findall(r"^spark\.redaction\.regex\s+(.*)$", conf_file("spark-defaults.conf").read_text(), re.MULTILINE)
    assert line == spark.conf.get("spark.redaction.regex")
