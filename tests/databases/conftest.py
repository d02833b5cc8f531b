"""Fixtures of the tests with real databases: PostgreSQL and MariaDB for the session, and each way to reach them."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import django
import django.conf
import django.db
import pytest
import sqlalchemy

from tests.support.database_servers import MariaDbServer, PostgresServer, mariadb_server, postgres_server
from tests.support.sql_world import SqlWorld

WAYS = [
    *(f"{kind}-{way}" for kind in ("sqlite", "postgresql", "mariadb") for way in ("dbapi", "sqlalchemy")),
    "sqlite-django",
    "postgresql-django",
]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for the session."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDbServer]:
    """A MariaDB for the session."""
    with mariadb_server() as server:
        yield server


@pytest.fixture(scope="session")
def django_databases(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Django with two databases. Returns the file of the one that is SQLite."""
    file = tmp_path_factory.mktemp("django") / "shop.db"
    in_postgres = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": "127.0.0.1"}
    databases = {
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)},
        "postgresql": {**in_postgres, "PORT": postgres.port},
    }
    django.conf.settings.configure(DATABASES=databases, USE_TZ=True)
    django.setup()
    return file


@pytest.fixture(params=WAYS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlWorld]:
    """A service's database, in each way that a service may reach it."""
    kind, way = request.param.split("-")
    server = {"postgresql": "postgres", "mariadb": "mariadb"}.get(kind)
    running: PostgresServer | MariaDbServer | None = request.getfixturevalue(server) if server else None
    file = request.getfixturevalue("django_databases") if way == "django" else tmp_path / "shop.db"
    connect = running.connect if running else lambda: sqlite3.connect(file, timeout=5)
    if way == "dbapi":
        yield SqlWorld(kind, connect, connect)
    elif way == "sqlalchemy":
        engine = sqlalchemy.create_engine(running.url if running else f"sqlite:///{file}")
        yield SqlWorld(kind, engine, connect)
        engine.dispose()
    else:
        used = django.db.connections["default" if kind == "sqlite" else kind]
        yield SqlWorld(kind, used, connect)
        used.close()
