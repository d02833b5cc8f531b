"""The declarative pipeline of examples/: it is validated and run by Spark's own command, in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from halfway.pipelines.runtime.paths import home
from tests.support.message_tables import append, row
from tests.support.paths import ROOT

PLACES = {"/var/lib/orders-pipeline": "storage", "/var/lib/halfway/warehouse/messages": "messages"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_pipeline_makes_a_typed_table_of_one_topic(tmp_path: Path) -> None:
    append(tmp_path / "messages", [row((0, 0), 0, body=b'{"item": "apples", "quantity": 3}'), row((0, 0), 1, topic="other")])
    shutil.copytree(ROOT / "examples" / "pipeline", tmp_path / "pipeline")
    spec = tmp_path / "pipeline" / "spark-pipeline.yml"
    text = spec.read_text()
    for place, name in PLACES.items():
        text = text.replace(place, str(tmp_path / name))
    spec.write_text(text)
    conf = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    environ = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPARK_DIST_CLASSPATH": f"{home()}/jars/spark/*",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    for command in ("dry-run", "run"):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("spark-pipelines")), *options, command],
            cwd=spec.parent, env=environ, capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = DeltaTable(str(tmp_path / "warehouse" / "orders")).to_pyarrow_table().to_pylist()
    assert [(each["transaction_id"], each["item"], each["quantity"], each["batch_id"]) for each in rows] == [("t0", "apples", 3, 0)]
