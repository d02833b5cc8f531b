"""Fetches the JARs of `conf/ivy.xml` and `conf/ivy-*.xml` into `<home>/jars/<set>/`, with PySpark's Ivy."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from halfway.conf.loader import conf_file
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import allow_no_other_to_write, changeable_by_others, home, locked
from halfway.schemas.errors import HalfwayError, MissingPackageError, SetupError

JarSet = Literal["spark", "kafka", "databases", "s3"]
_WHAT = {
    "spark": "Spark's connectors, about 23 MB",
    "kafka": "the local Kafka, about 45 MB",
    "databases": "the tests' databases, about 160 MB",
    "s3": "the connector of s3a://, about 13 MB",
}
_MARKER = ".complete"
_QUIET_ARCHIVE = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
_FETCH_LIMIT_S = 1800


def ensure_jars(conf: JarSet) -> list[Path]:
    """Return the JARs of one set. Fetches them first if they are missing.

    The set becomes visible in one rename, with a marker that holds the hash of the set's Ivy file and the names of the
    JARs. So a killed fetch does not count as complete, and another Ivy file is fetched again. Concurrent calls wait for
    each other.

    Raises:
        SetupError: Java or Ivy is missing, the fetch fails (the message names its log), a JAR differs from the pinned
            one, or another user may change it.
    """
    folder = home() / "jars" / conf
    if jars := jars_present(conf):
        return jars
    with locked(folder.parent / ".lock"):
        jars = jars_present(conf)
        if not jars:
            _fetch(conf, folder)
            jars = jars_present(conf)
    if not jars:
        raise SetupError(f"the JARs in {folder} changed while they were fetched: remove that folder and try again")
    return jars


def jars_present(conf: JarSet) -> list[Path]:
    """Return the JARs of one set that are here; empty if one is missing, or its Ivy file has changed. Fetches nothing.

    Raises:
        SetupError: the set's Ivy file is missing, a JAR differs from the pinned one, or another user may change it.
            Whoever can write the folder could otherwise put code into each command.
    """
    stamp, folder = _stamp(conf), home() / "jars" / conf
    try:
        found_stamp, *names = (folder / _MARKER).read_text().splitlines()
    except (OSError, ValueError):
        return []
    jars = [folder / name for name in names]
    if found_stamp != stamp or not all(jar.is_file() for jar in jars):
        return []
    _verify(conf, jars)
    return jars


def class_archive(java: Path, conf: JarSet = "spark") -> Path:
    """Return the path of the class archive of this Java and one set of JARs (`pipelines/local/class_archive.py`)."""
    binary = java.resolve()
    made = binary.stat()
    what = f"{binary} {made.st_size} {made.st_mtime_ns}"
    if conf == "spark":
        spark = importlib.util.find_spec("pyspark")
        what += f" {metadata.version('pyspark')} {spark and spark.origin}"
    return home() / "jars" / conf / f"classes-{hashlib.sha256(what.encode()).hexdigest()[:16]}.jsa"


def use_archive(archive: Path) -> list[str]:
    """Return the JVM's options to load classes from an archive. The JVM silently ignores one that does not fit.

    An archive holds code, which nothing pins. One that another user has made, or may change, is not used.
    """
    is_own = archive.is_file() and not changeable_by_others(archive)
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_QUIET_ARCHIVE] if is_own else []


def make_archive(archive: Path) -> list[str]:
    """Return the JVM's options to write an archive of the classes that it has loaded, when it ends."""
    return [f"-XX:ArchiveClassesAtExit={archive}", *_QUIET_ARCHIVE]


def class_path(jars: list[Path]) -> str:
    """Return the class path of these JARs."""
    return os.pathsep.join(str(jar) for jar in jars)


def _ivy_xml(conf: JarSet) -> Path:
    return conf_file("ivy.xml" if conf in ("spark", "kafka") else f"ivy-{conf}.xml")


def _stamp(conf: JarSet) -> str:
    return hashlib.sha256(_ivy_xml(conf).read_bytes()).hexdigest()


def _fetch(conf: JarSet, folder: Path) -> None:
    stamp = _stamp(conf)  # of what is fetched now
    for left_over in folder.parent.glob(f".{conf}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{conf}-", dir=folder.parent))
    try:
        _run_ivy(conf, _ivy_xml(conf), partial, folder.parent / f"{conf}.log")
        fetched = partial / conf
        names = sorted(jar.name for jar in fetched.glob("*.jar"))
        _verify(conf, [fetched / name for name in names])
        (fetched / _MARKER).write_text("\n".join([stamp, *names]) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        fetched.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _verify(conf: JarSet, jars: list[Path]) -> None:
    """Refuse JARs that differ from `conf/jars.sha256`, and those that another user may change.

    Ivy only compares them with checksums from the same server. Java opens them later than this reads them.
    """
    for jar in jars:
        if open_to_others := changeable_by_others(jar):
            raise SetupError(f"another user could put code into this command: {open_to_others}")
    pinned = conf_file("jars.sha256")
    known = {name: digest for digest, name in (line.split() for line in pinned.read_text().splitlines())}
    for jar in jars:
        digest, name = hashlib.sha256(jar.read_bytes()).hexdigest(), f"{conf}/{jar.name}"
        if known.get(name) != digest:
            what = "differs from the one that is pinned" if name in known else "is not pinned"
            raise SetupError(
                f"{jar.name} {what} in {pinned}: if you changed ivy.xml on purpose, put `{digest}  {name}` there; if not, somebody has "
                f"changed the file: remove {home() / 'jars' / conf}, and it is fetched again"
            )


def _run_ivy(conf: JarSet, ivy_xml: Path, target: Path, log: Path) -> None:
    command = [str(find_java()), "-cp", str(_ivy_jar()), "org.apache.ivy.Main", "-ivy", str(ivy_xml), "-confs", conf]
    command += ["-retrieve", f"{target}/[conf]/[artifact]-[revision].[ext]", "-types", "jar", "bundle"]
    sys.stderr.write(f"fetching the JARs of {_WHAT[conf]}, once ...\n")
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=_FETCH_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise SetupError(f"fetching the JARs took more than {_FETCH_LIMIT_S} s; see {log}, and try again") from None
    if done.returncode != 0 or not any((target / conf).glob("*.jar")):
        raise SetupError(f"cannot fetch the JARs ({_cause(log)}); is Maven Central in reach? See {log}, and try again")


def _cause(log: Path) -> str:
    """Return the first line in which Ivy reports what it could not get."""
    lines = [line.strip(" \t:") for line in log.read_text(errors="replace").splitlines()]
    telling = [line for line in lines if "not found" in line or "FAILED" in line or "Exception" in line or "rror:" in line]
    return telling[0] if telling else "Ivy gives no reason"


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [jar for place in places for jar in sorted(Path(place).glob("jars/ivy-*.jar"))]
    if not found:
        raise MissingPackageError("what fetches JARs, for Spark and the local Kafka,", "the jars folder of PySpark", "job,spark")
    return found[-1]


def main(names: list[str]) -> int:
    """Fetch the named sets; return the exit code."""
    wrong = [name for name in names if name not in get_args(JarSet)]
    if wrong or not names:
        sys.stderr.write(f"usage: python -m halfway.pipelines.runtime.jars {{{','.join(get_args(JarSet))}}} ...\n")
        return 2
    allow_no_other_to_write()
    try:
        for conf in get_args(JarSet):
            if conf in names:
                ensure_jars(conf)
    except HalfwayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
