"""`spark-submit` runs the job on a standalone cluster of two workers, as docs/cluster.md describes; one is killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.conf.loader import load_settings
from halfway.pipelines.demo.run import DemoProgress, run_demo
from halfway.pipelines.kafka.topic_setup import create_topics
from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.runtime.jars import ensure_jars
from halfway.pipelines.storage.delta_tables import table_path
from halfway.schemas.settings import ENV_PREFIX
from halfway.schemas.tables import Table
from tests.support.delta_rows import ids_in
from tests.support.fresh_python import make_fresh_python
from tests.support.kafka_topics import unique_topics
from tests.support.paths import ROOT
from tests.support.standalone_cluster import HOST, StandaloneCluster, children
from tests.support.waiting import until

BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
BUILD, SUBMIT, STOP = BLOCKS[:3]
MESSAGES = 400


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree as a user has it, with the fetched JARs."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("src", "pipelines", "transforms", "schemas", "clients", "conf"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    jars = copy / ".halfway" / "jars" / "spark"
    jars.mkdir(parents=True)
    for jar in ensure_jars("spark"):
        (jars / jar.name).symlink_to(jar)
    return copy


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python as the cluster's machines have it: what Halfway depends on, without Halfway, PySpark and Delta."""
    return make_fresh_python(tmp_path_factory.mktemp("python"), without={"pyspark", "py4j", "delta", "delta_spark"})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path) as running:
        yield running


def run(command: str, source: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-euc", command], cwd=source, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(420)
def test_every_transaction_ends_as_decided_though_a_worker_is_killed(
    broker: LocalBroker, cluster: StandaloneCluster, source: Path, python: Path, tmp_path: Path
) -> None:
    overrides = {
        **unique_topics(broker),
        "storage.warehouse": f"file://{tmp_path}/shared/warehouse",
        "storage.checkpoint": f"file://{tmp_path}/shared/checkpoint",
        "state.buckets": 8,
        "state.shuffle_partitions": 2,
        "resolution.transactionTimeOut": "4s",
        "resolution.transactionCheckInterval": "4s",
        "resolution.transactionCheckMax": 2,
    }
    settings = load_settings(environ={}, overrides=overrides)
    create_topics(settings, 2)
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME", "HALFWAY_HOME")},
        **{ENV_PREFIX + name.replace(".", "__").upper(): str(value) for name, value in overrides.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPARK_LOCAL_IP": HOST,
        "MASTER": cluster.master,
        "CLUSTER_PYTHON": str(python),
    }
    run(BUILD, source, environ)
    names = zipfile.ZipFile(source / "halfway.zip").namelist()
    assert {"halfway/pipelines/__main__.py", "halfway/conf/default.yaml"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"halfway"}
    log = tmp_path / "submit.log"
    with log.open("wb") as output:
        submit = subprocess.Popen(
            ["bash", "-euc", f"exec {SUBMIT}"], cwd=source, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        status = tmp_path / "shared" / "checkpoint" / "status.json"
        until(lambda: submit.poll() is not None or status.exists(), "the first batch", 120)
        assert submit.poll() is None, log.read_text()[-3000:]
        dead: list[int] = []
        committed: list[int] = []

        def kill_one(progress: DemoProgress) -> None:
            if not dead and progress.sent >= MESSAGES / 3:
                assert any("CoarseGrainedExecutorBackend" in command_line(pid) for pid in children(cluster.workers[0].pid))
                dead.extend(cluster.kill(0))
                committed.append(progress.found.committed)

        result = run_demo(settings, MESSAGES, None, say=print, show=kill_one)
        assert len(dead) >= 2
        assert committed[0] < result.expected.committed, "messages were on their way when the worker died"
        assert result.ok, (result.expected, result.found, result.problems, log.read_text()[-3000:])
        messages = ids_in(table_path(settings.storage, Table.MESSAGES))
        assert len(messages) == len(set(messages)) == result.expected.committed
        assert "Lost executor" in log.read_text()
        run(STOP.replace("$!", str(submit.pid)), source, environ)
        assert submit.wait(60) == 0, log.read_text()[-3000:]
    finally:
        for pid in (*children(submit.pid), submit.pid) if submit.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        submit.wait(30)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
