"""Prometheus' promtool: the machine's own, or the one of Debian's package, which is fetched once."""

import shutil
import subprocess
from pathlib import Path

import pytest

from halfway.pipelines.runtime.paths import locked
from tests.support.paths import ROOT

_FOLDER = ROOT / "build" / "promtool"
_FETCH_LIMIT_S = 120


def promtool() -> Path:
    """Return the path of promtool. Skips the test where it is neither installed nor to be had."""
    if found := shutil.which("promtool"):
        return Path(found)
    binary = _FOLDER / "usr" / "bin" / "promtool"
    with locked(_FOLDER.with_suffix(".lock")):
        if not binary.exists():
            _fetch()
    return binary


def _fetch() -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("promtool is missing: install Prometheus")
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    try:
        # The package's server programs need 95 MB, so that only the tool is kept.
        subprocess.run(["apt-get", "download", "prometheus"], cwd=_FOLDER, capture_output=True, check=True, timeout=_FETCH_LIMIT_S)
        [package] = _FOLDER.glob("prometheus_*.deb")
        archive = subprocess.run(["dpkg", "--fsys-tarfile", package], capture_output=True, check=True, timeout=_FETCH_LIMIT_S).stdout
        subprocess.run(["tar", "-x", "-C", _FOLDER, "./usr/bin/promtool"], input=archive, check=True, timeout=_FETCH_LIMIT_S)
    except (subprocess.SubprocessError, ValueError) as error:
        pytest.skip(f"promtool is missing and Debian's package cannot be fetched ({error}): install Prometheus")
    package.unlink()
