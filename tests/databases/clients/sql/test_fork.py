"""A server loads the application and forks (`gunicorn --preload`): each worker needs connections of its own."""

import subprocess
import sys

import pytest

from tests.support.database_servers import MariaDbServer, PostgresServer
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

# One worker is in a block. Meanwhile the other one answers the check of another transaction, in a transaction that it
# commits: on the same connection that would be the block's.
PRELOADED = """
import os, sys, time
from sqlalchemy import create_engine, text
from halfway import CheckRequest, SqlTransactions
from halfway.testing import in_memory_halfway

engine = create_engine(sys.argv[1])
with engine.begin() as connection:
    connection.execute(text("CREATE TABLE forked_orders (item VARCHAR(20))"))
transactions = SqlTransactions(engine)
transactions.create_table()
is_in_block, may_go_on = os.pipe(), os.pipe()

def block():
    with in_memory_halfway() as halfway:
        with halfway.producer(transactions).transaction() as tx:
            tx.execute(text("INSERT INTO forked_orders VALUES ('apples')"))
            tx.send("orders", b"apples")
            os.write(is_in_block[1], b"x")
            os.read(may_go_on[0], 1)
        print(len(halfway.messages("orders")), flush=True)

def check():
    os.read(is_in_block[0], 1)
    fields = {"topic": "orders", "body": b"", "producer_group": "shop", "born_at_ms": time.time_ns() // 1_000_000}
    transaction_id = transactions.new_id() + ".0"
    request = CheckRequest(transaction_id=transaction_id, check_times=1, check_id="c", **fields)
    print(transactions.check_local_transaction(request).name, flush=True)
    os.write(may_go_on[1], b"x")

children = []
for work in (block, check):
    children.append(os.fork())
    if children[-1] == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os.write(may_go_on[1], b"x")
            os._exit(code)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
with create_engine(sys.argv[1]).begin() as connection:
    print(connection.execute(text("SELECT COUNT(*) FROM forked_orders")).scalar())
    connection.execute(text("DROP TABLE forked_orders"))
"""


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_check_in_one_worker_does_not_commit_the_block_of_another(kind: str, request: pytest.FixtureRequest) -> None:
    server: PostgresServer | MariaDbServer = request.getfixturevalue(kind)
    command = [sys.executable, "-c", PRELOADED, server.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout.split() == ["ROLLBACK", "1", "0", "0", "1"], done.stdout + done.stderr
