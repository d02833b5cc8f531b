"""Finds the Java that runs Spark, Ivy and the local broker."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from halfway.schemas.errors import HalfwayError, SetupError

MIN_VERSION = 17
SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""Only the fast compiler, for a JVM that ends before optimised code pays for its compilation.

Without the other compiler, Java reserves 48 MB for code and not 240. Spark may fill that within a minute, and then ends
with "Out of space in CodeCache for method handle intrinsic".
"""
_REMEDY = f"install Java {MIN_VERSION} or newer and set JAVA_HOME to it, or put its `java` on the PATH"
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_ASK_LIMIT_S = 60


def find_java() -> Path:
    """Return the `java` of JAVA_HOME if that is set, as PySpark does, or else of the PATH.

    Raises:
        SetupError: there is no Java, it does not run, or it is older than Java 17.
    """
    java = _locate()
    version = _version(java)
    if version < MIN_VERSION:
        raise SetupError(f"{java} is Java {version}, Halfway needs {MIN_VERSION} or newer: {_REMEDY}")
    return java


def _locate() -> Path:
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        java = Path(java_home) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise SetupError(f"JAVA_HOME is {java_home}, which has no bin/java: unset it, or {_REMEDY}")
        return java
    found = shutil.which("java")
    if found is None:
        raise SetupError(f"there is no Java: {_REMEDY}")
    return Path(found)


def _version(java: Path) -> int:
    """Return the major version of `java`. Before Java 9 the version was 1.8 and the like."""
    try:
        asked = subprocess.run(
            [str(java), "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{java} does not run ({type(error).__name__}): {_REMEDY}") from None
    match = _VERSION.search(asked.stderr + asked.stdout)
    # macOS has a /usr/bin/java that only prints that Java is missing.
    if asked.returncode != 0 or match is None:
        raise SetupError(f"{java} -version prints no version: {_REMEDY}")
    major, minor = match.groups()
    return int(minor) if major == "1" and minor else int(major)


def main() -> int:
    """Print to stderr what is wrong with Java; return the exit code."""
    try:
        find_java()
    except HalfwayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
