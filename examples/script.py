"""The shortest service: `python -m examples.script apples` writes an order and publishes it, both or neither."""

import json
import sqlite3
import sys

from halfway import SqlTransactions, TransactionProducer, load_settings


def connect() -> sqlite3.Connection:
    """Open the service's database."""
    return sqlite3.connect("script.db")


if len(sys.argv) != 2:
    sys.exit("usage: python -m examples.script ITEM")
connect().execute("CREATE TABLE IF NOT EXISTS orders (item TEXT)")
with TransactionProducer(load_settings().kafka, "order-script", SqlTransactions(connect)) as producer, producer.transaction() as tx:
    tx.execute("INSERT INTO orders VALUES (?)", (sys.argv[1],))
    tx.send("orders", json.dumps({"item": sys.argv[1], "quantity": 1}).encode())
