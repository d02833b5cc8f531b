"""A service whose own packages have the names of our folders installs the wheel and publishes a message."""

import subprocess
from pathlib import Path

from tests.support.client_world import read
from tests.support.fresh_python import build_wheel, copy_source, install, make_fresh_python
from tests.support.kafka_topics import MakeTopics

SERVICE = """
import sys
import schemas
from halfway import CheckRequest, HalfMessage, LocalTransactionState, TransactionProducer, load_settings

class Orders:
    def execute_local_transaction(self, message: HalfMessage, arg: object) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: CheckRequest) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

with TransactionProducer(load_settings().kafka, "order-service", Orders()) as producer:
    result = producer.send_in_transaction("orders", schemas.BODY, transaction_id="order-1")
print(result.transaction_id, result.state, "pyspark" in sys.modules)
"""


def test_a_message_is_published_from_an_application_with_a_package_schemas(topics: MakeTopics, tmp_path: Path) -> None:
    kafka = topics(partitions=1).kafka
    environment, application = tmp_path / "environment", tmp_path / "application"
    python = make_fresh_python(environment)
    (tmp_path / "wheel").mkdir()
    install(build_wheel(copy_source(tmp_path / "source"), tmp_path / "wheel"), environment)
    for name in ("schemas", "clients", "pipelines"):
        (application / name).mkdir(parents=True)
        (application / name / "__init__.py").write_text("BODY = b'of the application'\n")
    (application / "service.py").write_text(SERVICE)
    named = {name: getattr(kafka, name) for name in ("bootstrap_servers", "half_topic", "op_topic", "check_topic")}
    environ = {f"HALFWAY__KAFKA__{name.upper()}": str(value) for name, value in named.items()}
    command = [str(python), "service.py"]
    done = subprocess.run(command, cwd=application, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "order-1 COMMIT False"), done.stderr
    [half] = read(kafka, kafka.half_topic, 1)
    assert (half.key(), half.value()) == (b"order-1", b"of the application")
