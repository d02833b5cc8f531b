"""A PostgreSQL and a MariaDB of one test run: programs from Maven Central, on free ports, with their data in a folder.

PostgreSQL refuses to run as root. Where the tests do, it runs as `nobody`, from a folder that `nobody` owns.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from halfway.pipelines.local.processes import free_port
from halfway.pipelines.runtime.jars import ensure_jars
from halfway.pipelines.runtime.paths import locked
from tests.support.waiting import until

_LIMIT_S = 120
_OF_MARIADB = {("bin", "mariadbd"), ("libs", "libmariadb.so.3"), ("share", "english"), ("share", "charsets")}


class PostgresServer:
    """A PostgreSQL that was started for the tests."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port, self.process = port, process

    def connect(self, **options: Any) -> "psycopg.Connection[Any]":
        return psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", connect_timeout=5, **options)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"


class MariaDbServer:
    """A MariaDB that was started for the tests."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port, self.process = port, process

    def connect(self, **options: Any) -> Any:
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", database="test", connect_timeout=5, **options)

    @property
    def url(self) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/test"


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a PostgreSQL."""
    with _folder() as (folder, user):
        [jar] = [path for path in ensure_jars("databases") if "postgres" in path.name]
        with (
            zipfile.ZipFile(jar) as packed,
            packed.open("postgres-linux-x86_64.txz") as inner,
            tarfile.open(fileobj=inner, mode="r:xz") as tar,
        ):
            tar.extractall(folder, filter="data")
        data, port = folder / "data", free_port()
        command = [
            folder / "bin" / "initdb",
            "--pgdata",
            data,
            "--username",
            "postgres",
            "--auth",
            "trust",
            "--encoding",
            "UTF8",
            "--no-sync",
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=_LIMIT_S, **user)
        assert done.returncode == 0, done.stdout + done.stderr
        server = [folder / "bin" / "postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-k", folder, "-c", "max_connections=200"]
        with _running([str(part) for part in server], folder / "log", **user) as process:
            postgres = PostgresServer(port, process)
            _wait_for(lambda: postgres.connect().close(), process, folder / "log", psycopg.Error)
            yield postgres


@contextmanager
def mariadb_server() -> Iterator[MariaDbServer]:
    """Run a MariaDB."""
    with _folder() as (folder, user):
        program, port, log = _unpacked_mariadb(), free_port(), folder / "log"
        command = [program / "bin" / "mariadbd", "--no-defaults", f"--datadir={folder}", f"--lc-messages-dir={program / 'share'}"]
        command += [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}", "--skip-grant-tables"]
        command += [
            "--skip-networking=0",
            "--skip-ssl",
            "--max-connections=200",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M",
        ]
        if user:
            command += ["--user=root"]
        with _running([str(part) for part in command], log, env={"LD_LIBRARY_PATH": str(program / "libs")}) as process:

            def make_database() -> None:
                with pymysql.connect(host="127.0.0.1", port=port, user="root") as connection, connection.cursor() as cursor:
                    cursor.execute("CREATE DATABASE IF NOT EXISTS test")

            _wait_for(make_database, process, log, pymysql.Error)
            yield MariaDbServer(port, process)


def _unpacked_mariadb() -> Path:
    """Return the folder with the programs, 350 MB, which are unpacked once for each version."""
    [jar] = [path for path in ensure_jars("databases") if "mariaDB" in path.name]
    unpacked = jar.with_suffix("")
    with locked(jar.parent / ".unpack.lock"):
        if not unpacked.is_dir():
            partial = Path(tempfile.mkdtemp(dir=jar.parent))
            with zipfile.ZipFile(jar) as packed:
                for name in packed.namelist():
                    path = partial / name.partition("/linux/")[2]
                    if not name.endswith("/") and path.relative_to(partial).parts[:2] in _OF_MARIADB:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with packed.open(name) as source, path.open("wb") as target:
                            shutil.copyfileobj(source, target)
            (partial / "bin" / "mariadbd").chmod(0o755)
            partial.rename(unpacked)
    return unpacked


def _wait_for(attempt: Callable[[], None], process: "subprocess.Popen[bytes]", log: Path, error: type[Exception]) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            attempt()
        except error:
            return False
        return True

    until(answers, "the database answers", limit_s=_LIMIT_S)


@contextmanager
def _folder() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make a folder, and return it with the arguments that run a process as its owner."""
    folder = Path(tempfile.mkdtemp(prefix="halfway-db-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    folder.chmod(0o755)
    try:
        yield folder, user
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(command: list[str], log: Path, **options: Any) -> "Iterator[subprocess.Popen[bytes]]":
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGQUIT if "postgres" in command[0] else signal.SIGKILL)
        process.wait(_LIMIT_S)
