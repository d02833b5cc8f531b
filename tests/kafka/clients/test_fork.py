"""A producer belongs to the process that started it: a forked child can neither use it nor is held up by it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from halfway.schemas.settings import KafkaSettings
from tests.support.client_world import LIMIT_S, ops
from tests.support.paths import ROOT

FORKS = """
import os, sys, warnings
from halfway import HalfwayError, LocalTransactionState, ProducerClosedError, TransactionProducer
from halfway.schemas.settings import KafkaSettings

warnings.simplefilter("ignore")

class Listener:
    def execute_local_transaction(self, message, arg): return LocalTransactionState.COMMIT
    def check_local_transaction(self, message): raise AssertionError

def use(producer):
    try:
        producer.send_in_transaction("orders", b"", transaction_id="of the child")
    except ProducerClosedError as error:
        print(error, flush=True)

settings = KafkaSettings.model_validate_json(sys.argv[1])
with TransactionProducer(settings, "shop", Listener()) as producer:
    producer.send_in_transaction("orders", b"", transaction_id="before")
    child = os.fork()
    if child == 0:
        CHILD
    _, status = os.waitpid(child, 0)
    producer.send_in_transaction("orders", b"", transaction_id="after")
    print("the child ended with", os.waitstatus_to_exitcode(status))
"""
CHILDREN = {
    "uses it and leaves the block": "use(producer); sys.exit(3)",
    "drops it": "del producer, Listener; import gc; gc.collect(); sys.exit(3)",
    "closes it": "use(producer); assert producer.close() is True; sys.exit(3)",
    "makes its own": "use(TransactionProducer(settings, 'shop', Listener())); sys.exit(3)",
    "closes its own": "own = TransactionProducer(settings, 'shop', Listener()); use(own); own.close(); sys.exit(3)",
}


@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
def test_a_forked_child_ends(kafka: KafkaSettings, child: str) -> None:
    script = FORKS.replace("CHILD", child)
    arguments = [sys.executable, "-c", script, kafka.model_dump_json()]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    said = printed.splitlines()
    assert said[-1] == "the child ended with 3"
    is_refused = "use(producer)" in child
    assert [line for line in said[:-1] if "make a new one in each process" in line] == said[: int(is_refused)]
    assert len(said) == 1 + is_refused
    sent = {name for name, _ in ops(kafka)}
    assert sent == {"before", "after", *(["of the child"] if "use(TransactionProducer" in child or "use(own)" in child else [])}


FORKS_IN_A_START = """
import os, sys, threading, warnings
from halfway import LocalTransactionState, ProducerClosedError, TransactionProducer
from halfway.clients.instance import GroupInstance
from halfway.schemas.settings import KafkaSettings

warnings.simplefilter("ignore")
starting, forked = threading.Event(), threading.Event()

class Listener:
    def execute_local_transaction(self, message, arg): return LocalTransactionState.COMMIT
    def check_local_transaction(self, message): raise AssertionError

class SlowInstance(GroupInstance):
    def make_sender(self):
        starting.set()
        forked.wait()
        return super().make_sender()

class SlowProducer(TransactionProducer):
    def _make_instance(self, *arguments): return SlowInstance(*arguments)

producer = SlowProducer(KafkaSettings.model_validate_json(sys.argv[1]), "shop", Listener())
thread = threading.Thread(target=producer.start)
thread.start()
starting.wait()
child = os.fork()
if child == 0:
    try:
        producer.start()
    except ProducerClosedError as error:
        print(error, flush=True)
    os._exit(3)
_, status = os.waitpid(child, 0)
forked.set()
thread.join()
producer.send_in_transaction("orders", b"", transaction_id="after")
producer.close()
print("the child ended with", os.waitstatus_to_exitcode(status))
"""


def test_a_child_that_is_forked_while_the_producer_starts_is_told(kafka: KafkaSettings) -> None:
    """The lock of the start, which another thread holds, stays held in the child."""
    arguments = [sys.executable, "-c", FORKS_IN_A_START, kafka.model_dump_json()]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = printed.splitlines()
    assert said[1:] == ["the child ended with 3"]
    assert "make a new one in each process" in said[0]
