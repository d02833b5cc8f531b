"""The short examples in their own processes: each writes an order, and its message is committed in Kafka."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import check_of, ops, read, send_checks
from tests.support.paths import ROOT

SCRIPT = ["-m", "examples.script", "apples"]
FASTAPI = """
from starlette.testclient import TestClient
from examples.fastapi_shop import app
with TestClient(app) as client:
    response = client.post("/orders", json={"item": "apples"})
assert response.status_code == 200 and len(response.json()["transaction"]) == 32, response.text
"""
DJANGO = """
from examples import django_shop
from django.test import Client
client = Client(SERVER_NAME="localhost")
assert client.get("/").status_code == 404
response = client.get("/orders/apples")
assert response.status_code == 200 and len(response.json()["transaction"]) == 32, response.content
assert django_shop.producer.close()
"""


def environ_of(kafka: KafkaSettings) -> dict[str, str]:
    names = ("bootstrap_servers", "half_topic", "op_topic", "check_topic")
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        **{f"HALFWAY__KAFKA__{n.upper()}": str(getattr(kafka, n)) for n in names},
    }


@pytest.mark.parametrize(
    ("arguments", "group", "file", "table"),
    [
        (SCRIPT, "order-script", "script.db", "orders"),
        (["-c", FASTAPI], "order-api", "fastapi_shop.db", "orders"),
        (["-c", DJANGO], "order-site", "django_shop.db", "shop_order"),
    ],
    ids=["script", "fastapi", "django"],
)
def test_an_order_is_written_and_its_message_committed(
    kafka: KafkaSettings, tmp_path: Path, arguments: list[str], group: str, file: str, table: str
) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environ_of(kafka), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [half] = read(kafka, kafka.half_topic)
    assert b"apples" in (half.value() or b"")
    assert ops(kafka) == [((half.key() or b"").decode(), {"ACTION": "COMMIT", "PGROUP": group, "INCARNATION": "0"})]
    assert [path.name for path in tmp_path.glob("*.db")] == [file], "its own: their tables differ"
    with closing(sqlite3.connect(tmp_path / file)) as database:
        assert database.execute(f"SELECT item FROM {table}").fetchall() == [("apples",)]


def test_a_service_that_was_restarted_answers_checks_before_its_first_order(kafka: KafkaSettings, tmp_path: Path) -> None:
    stays = "import sys; from examples import django_shop; sys.stdin.read(); assert django_shop.producer.close()"
    with subprocess.Popen([sys.executable, "-c", stays], cwd=tmp_path, env=environ_of(kafka), stdin=subprocess.PIPE) as service:
        send_checks(kafka, check_of("a", group="order-site"))
        try:
            [(name, headers)] = ops(kafka, at_least=1)
        finally:
            service.communicate()
    assert (name, headers["FROM_CHECK"], service.returncode) == ("a", "true", 0)


def test_the_script_without_an_item_says_what_it_takes(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, *SCRIPT[:-1]], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "usage: python -m examples.script ITEM\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["script", "fastapi_shop", "django_shop"])
def test_an_example_has_no_check_code(name: str) -> None:
    assert "check_local_transaction" not in (ROOT / "examples" / f"{name}.py").read_text()
