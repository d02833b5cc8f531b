"""Reads Delta tables with delta-rs, so that neither Spark nor the product is asked."""

from pathlib import Path
from typing import Any

import pyarrow
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError


def delta_rows(table: str | Path, query: str = "SELECT * FROM rows") -> list[dict[str, Any]]:
    """Run a SQL query over a table, which the query calls `rows`. Return no row if the table does not exist."""
    try:
        delta = DeltaTable(str(table))
    except TableNotFoundError:
        return []
    found: list[dict[str, Any]] = pyarrow.table(QueryBuilder().register("rows", delta).execute(query)).to_pylist()
    return found


def ids_in(table: str | Path) -> list[str]:
    """Return the transaction id of each row of a table."""
    return [row["transaction_id"] for row in delta_rows(table, "SELECT transaction_id FROM rows")]
