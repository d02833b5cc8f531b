"""Starts commands of Halfway by spark-submit, as docs/cluster.md describes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark

from halfway.pipelines.runtime.jars import JarSet, ensure_jars
from tests.support.commands import as_options
from tests.support.paths import ROOT

_HOST = "127.0.0.1"
_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
_SMALL = {"spark.driver.bindAddress": _HOST, "spark.ui.enabled": "false", "spark.driver.memory": "1g"}


def spark_submit(
    log: Path,
    *arguments: str,
    conf: Mapping[str, str],
    options: Mapping[str, object],
    jars: Sequence[JarSet] = ("spark",),
    environ: Mapping[str, str] | None = None,
    script: Path = ROOT / "pipelines" / "__main__.py",
) -> subprocess.Popen[bytes]:
    """Start a command, or another script, in a session of its own.

    Args:
        log: gets what it writes; its folder is the current directory.
        arguments: of the command.
        conf: Spark's configuration.
        options: Halfway's settings, by dotted name.
        jars: the sets of JARs to ship.
        environ: variables in addition.
        script: what to run.
    """
    shipped = ",".join(str(jar) for name in jars for jar in ensure_jars(name))
    command = [str(_SUBMIT), "--master", "local[2]", "--properties-file", str(ROOT / "conf" / "spark-defaults.conf"), "--jars", shipped]
    command += [part for name, value in {**_SMALL, **conf}.items() for part in ("--conf", f"{name}={value}")]
    command += [str(script), *arguments, *as_options(options)]
    own = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "SPARK_LOCAL_IP": _HOST}
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=log.parent,
            env={**os.environ, **own, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
