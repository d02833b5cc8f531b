"""An order service with FastAPI and SQLAlchemy's asyncio: `uvicorn examples.fastapi_shop:app`.

`pip install uvicorn` brings that command. The service writes an order and publishes it, both or neither. Halfway's
checks are answered from the database: no code here.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, insert
from sqlalchemy.ext.asyncio import create_async_engine

from halfway import AsyncSqlTransactions, AsyncTransactionProducer, load_settings

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///fastapi_shop.db"))
metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("item", String(40)), Column("quantity", Integer))
transactions = AsyncSqlTransactions(engine)
producer = AsyncTransactionProducer(load_settings().kafka, "order-api", transactions)


class Order(BaseModel):
    """A customer's order."""

    item: str
    quantity: int = 1


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Answer checks for as long as the service runs."""
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await transactions.create_table()
    async with producer:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders")
async def place(order: Order) -> dict[str, str]:
    """Place an order."""
    async with producer.transaction() as tx:
        await tx.execute(insert(orders).values(**order.model_dump()))
        tx.send("orders", order.model_dump_json().encode(), tags="placed")
    return {"transaction": tx.transaction_id}
