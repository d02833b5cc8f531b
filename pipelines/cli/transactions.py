"""`halfway transactions`: the table that a service has in its own database."""

import typer

from halfway.clients.sql.transaction_table import DDL

app = typer.Typer(no_args_is_help=True)


@app.callback()
def transactions() -> None:
    """Print the statements for the table that a service keeps in its own database."""


@app.command()
def ddl() -> None:
    """Print the statements that create the table in SQLite, PostgreSQL and MariaDB, for your migrations."""
    for statement in DDL:
        typer.echo(f"{statement};")
