"""An S3 server on this machine, moto's, and the job on it by spark-submit, as docs/cluster.md describes."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import boto3

from halfway.pipelines.local.processes import free_port
from tests.support.submit import spark_submit
from tests.support.waiting import until

_HOST = "127.0.0.1"
BUCKET = "lake"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
_REQUEST = re.compile(r'(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1.1(?:\x1b\[0m)?" (\d+)')


class ObjectStore:
    """A server with one empty bucket. `with` starts and stops it. It speaks S3, conditional writes included."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"http://{_HOST}:{free_port()}"
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        port = self.endpoint.rpartition(":")[2]
        command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", port]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            until(self._answers, "the S3 server", 60)
            boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                region_name=KEYS["AWS_REGION"],
                aws_access_key_id="test",
                aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            ).create_bucket(Bucket=BUCKET)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.endpoint, timeout=5):
            return True
        return False

    def for_delta_rs(self) -> dict[str, str]:
        """Return delta-rs' options for the bucket."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true"}

    def requests(self) -> list[tuple[str, str, int]]:
        """Return method, path and status of every request so far."""
        return [(method, path, int(status)) for method, path, status in _REQUEST.findall(self._log.read_text(errors="replace"))]

    def start(self, log: Path, *arguments: str, options: dict[str, object]) -> "subprocess.Popen[bytes]":
        """Start a command of Halfway by spark-submit, with hadoop-aws."""
        s3a = {"endpoint": self.endpoint, "endpoint.region": KEYS["AWS_REGION"], "path.style.access": "true"}
        conf = {f"spark.hadoop.fs.s3a.{name}": value for name, value in s3a.items()}
        return spark_submit(log, *arguments, conf=conf, options=options, jars=("spark", "s3"), environ=KEYS)
