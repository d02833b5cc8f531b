"""The command's process: what it imports, what it prints where there is no UTF-8, and a Ctrl-C while it starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import halfway_command, run_halfway
from tests.support.waiting import until

# A package that imports as slowly as Spark's on a busy machine, and marks that it does.
SLOW = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text("importing")
time.sleep(60)
"""


@pytest.mark.parametrize("command", ["--help", "broker status", "transactions ddl"])
def test_a_command_that_needs_no_spark_imports_none(command: str) -> None:
    """Not even the types: `--help` takes a third of a second, and two with Spark and pandas."""
    code = (
        "import sys, typer; from halfway.__main__ import main\n"
        f"sys.argv[1:] = {command.split()}\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'pyspark', 'py4j', 'delta', 'pandas', 'pyarrow', 'deltalake'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_in_the_current_directory_hide_no_package(tmp_path: Path) -> None:
    for name in ("delta", "pandas", "pydantic", "pyspark", "rich", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the current directory')")
    done = run_halfway("pending", cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("error: there is no state in ")) == (1, True), done.stderr


def test_what_is_not_ascii_is_printed_without_utf_8(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = run_halfway("doctor", cwd=tmp_path, environ=locale)
    assert done.returncode == 1, done.stderr  # no Kafka is configured
    assert "✓ python" in done.stdout


def test_ctrl_c_during_a_start_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    """While a package is imported, wherever that is."""
    mark = tmp_path / "mark"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "typer.py").write_text(SLOW)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'slow')!r}); from halfway.__main__ import main; main()"
    process = subprocess.Popen([sys.executable, "-P", "-c", code, str(mark)], stderr=subprocess.PIPE)
    until(mark.exists, "the import")
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=10)
    assert (process.returncode, printed) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("command", ["status", "pending", "pending --json"])
def test_an_empty_folder_has_no_state_and_stays_empty(tmp_path: Path, command: str) -> None:
    done = subprocess.run(halfway_command(*command.split()), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: there is no state in {tmp_path}/.halfway/checkpoint yet: run `halfway resolve`")
    assert list(tmp_path.iterdir()) == []
