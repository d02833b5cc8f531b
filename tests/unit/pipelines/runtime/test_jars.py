"""Finding Java, and fetching JARs with Ivy: once, pinned, and never in part."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from halfway.conf import loader
from halfway.conf.loader import PACKAGED, conf_file
from halfway.pipelines.runtime import paths
from halfway.pipelines.runtime.jars import JarSet, ensure_jars, jars_present, use_archive
from halfway.pipelines.runtime.java import find_java
from halfway.pipelines.runtime.paths import home
from halfway.schemas.errors import SetupError
from tests.support.paths import ROOT

# One small JAR that the project's own ivy.xml has too. Ivy keeps a report of each module in its user's cache, where two
# processes would write it at once.
ONE_JAR = """<ivy-module version="2.0"><info organisation="halfway" module="test-{process}"/>
<configurations><conf name="kafka"/></configurations>
<dependencies><dependency org="org.slf4j" name="slf4j-api" rev="{rev}" conf="kafka->default"/></dependencies></ivy-module>"""
LOADS_OWN_IVY = """
from pathlib import Path
from halfway.conf import loader
from halfway.pipelines.runtime.jars import ensure_jars, main
loader.PACKAGED = Path("conf").absolute()
"""
IN_REACH = "1.7.36"
NOWHERE = "0.0.0-none"


@pytest.fixture
def project(empty_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with its own home, and a package with its own ivy.xml."""
    write_ivy(empty_directory, IN_REACH)
    (empty_directory / "conf" / "jars.sha256").write_bytes((PACKAGED / "jars.sha256").read_bytes())
    monkeypatch.setattr(loader, "PACKAGED", empty_directory / "conf")
    return empty_directory


def write_ivy(project: Path, rev: str) -> None:
    (project / "conf").mkdir(exist_ok=True)
    (project / "conf" / "ivy.xml").write_text(ONE_JAR.format(rev=rev, process=os.getpid()))


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that hides Java. A call that succeeds afterwards has fetched nothing."""
    return lambda: monkeypatch.setenv("JAVA_HOME", "/nowhere")


def java_that_says(folder: Path, line: str, code: int = 0) -> Path:
    """Make a JAVA_HOME whose java answers `-version` with `line`."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{line}' >&2\nexit {code}\n")
    java.chmod(0o755)
    return folder


def test_home_is_below_the_current_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == project / ".halfway"
    monkeypatch.setenv("HALFWAY_HOME", "elsewhere")
    assert home() == project / "elsewhere"


def test_a_file_that_somebody_put_into_the_current_directory_does_not_count(empty_directory: Path) -> None:
    write_ivy(empty_directory, NOWHERE)
    assert conf_file("ivy.xml") == ROOT / "conf" / "ivy.xml"
    with pytest.raises(SetupError, match=r"conf/none\.xml is missing"):
        conf_file("none.xml")


def test_jars_are_fetched_once(project: Path, no_java: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    first = ensure_jars("kafka")
    assert first == [project / ".halfway" / "jars" / "kafka" / f"slf4j-api-{IN_REACH}.jar"]
    assert first[0].stat().st_size > 10_000
    assert capsys.readouterr().err.startswith("fetching the JARs of the local Kafka")
    no_java()
    assert ensure_jars("kafka") == first
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("project")
def test_a_lost_jar_is_fetched_again() -> None:
    ensure_jars("kafka")[0].unlink()
    assert ensure_jars("kafka")[0].is_file()


def test_jars_are_fetched_again_for_another_ivy_xml(project: Path, no_java: Callable[[], None]) -> None:
    ensure_jars("kafka")
    write_ivy(project, NOWHERE)
    no_java()
    with pytest.raises(SetupError, match="JAVA_HOME"):
        ensure_jars("kafka")


def test_jars_of_a_killed_fetch_are_fetched_again(project: Path) -> None:
    jars = project / ".halfway" / "jars"
    for folder in (jars / "kafka", jars / ".kafka-killed" / "kafka"):
        folder.mkdir(parents=True)
        (folder / f"slf4j-api-{IN_REACH}.jar").write_bytes(b"half a JAR")
    assert ensure_jars("kafka")[0].stat().st_size > 10_000
    assert not (jars / ".kafka-killed").exists()


def test_a_failed_fetch_names_its_log_and_leaves_no_jar(project: Path) -> None:
    write_ivy(project, NOWHERE)
    log = project / ".halfway" / "jars" / "kafka.log"
    with pytest.raises(SetupError, match=f"slf4j-api;{NOWHERE}") as caught:
        ensure_jars("kafka")
    assert str(log) in str(caught.value)
    assert NOWHERE in log.read_text()
    assert sorted(path.name for path in log.parent.iterdir()) == [".lock", "kafka.log"]


@pytest.mark.parametrize(
    ("line", "what"), [("0" * 64 + "  kafka/slf4j-api-1.7.36.jar\n", "differs from the one that is pinned"), ("", "is not pinned")]
)
def test_a_jar_that_differs_from_the_pinned_one_is_refused(project: Path, line: str, what: str) -> None:
    (project / "conf" / "jars.sha256").write_text(line)
    with pytest.raises(SetupError, match=f"slf4j-api-{IN_REACH}.jar {what}") as caught:
        ensure_jars("kafka")
    [right] = re.findall(r"put `([^`]+)` there", str(caught.value))
    assert not (project / ".halfway" / "jars" / "kafka").exists()
    (project / "conf" / "jars.sha256").write_text(right)
    assert ensure_jars("kafka")


@pytest.mark.usefixtures("project")
def test_a_jar_that_somebody_changed_later_is_refused() -> None:
    [jar] = ensure_jars("kafka")
    jar.write_bytes(jar.read_bytes() + b"more")
    for look in (ensure_jars, jars_present):
        with pytest.raises(
            SetupError, match=rf"slf4j-api-{IN_REACH}.jar differs from the one that is pinned .* somebody has changed the file"
        ):
            look("kafka")


def test_a_planted_set_of_jars_is_refused(project: Path) -> None:
    """A directory with `.halfway/jars` of its own, where a command is started."""
    folder = project / ".halfway" / "jars" / "kafka"
    folder.mkdir(parents=True)
    (folder / "evil.jar").write_bytes(b"PK")
    (folder / ".complete").write_text(f"{hashlib.sha256(conf_file('ivy.xml').read_bytes()).hexdigest()}\nevil.jar\n")
    with pytest.raises(SetupError, match=r"evil\.jar is not pinned"):
        ensure_jars("kafka")


NOBODY = 65534
PLACES = (".halfway", ".halfway/jars", ".halfway/jars/kafka", f".halfway/jars/kafka/slf4j-api-{IN_REACH}.jar")
only_root_can = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")


@pytest.fixture
def fetched(project: Path, no_java: Callable[[], None]) -> Path:
    """The project, with JARs and a class archive."""
    old = os.umask(0o022)
    [jar] = ensure_jars("kafka")
    archive_beside(jar).touch()
    os.umask(old)
    no_java()
    return project


def archive_beside(jar: Path) -> Path:
    return jar.with_name("classes.jsa")


def refusal(project: Path) -> str | None:
    """Return why the JARs are refused; None if they are used."""
    archive = archive_beside(project / PLACES[-1])
    try:
        jars = ensure_jars("kafka")
    except SetupError as error:
        with pytest.raises(SetupError, match=re.escape(str(error))):
            jars_present("kafka")
        return str(error)
    assert jars == jars_present("kafka")
    assert use_archive(archive)[0] == f"-XX:SharedArchiveFile={archive}"
    return None


@only_root_can
@pytest.mark.parametrize("place", PLACES)
def test_jars_that_belong_to_another_user_are_refused(fetched: Path, place: str) -> None:
    """Nobody else must be able to put another JAR there after its hash was compared, and before Java opens it."""
    os.chown(fetched / place, NOBODY, NOBODY)
    told = refusal(fetched)
    assert told is not None
    assert f"{fetched / place} belongs to nobody" in told
    assert "HALFWAY_HOME" in told
    os.chown(fetched / place, os.geteuid(), os.getegid())
    assert refusal(fetched) is None


@pytest.mark.parametrize("place", PLACES)
def test_jars_that_others_may_change_are_refused(fetched: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(paths, "_is_private", lambda _: False)
    for mode in (0o002, 0o020, 0o022):
        (fetched / place).chmod((fetched / place).stat().st_mode | mode)
        told = refusal(fetched)
        assert told is not None
        [command] = re.findall(r"`([^`]+)`", told)
        assert command == f"chmod -R go-w {fetched / place}"
        subprocess.run(command.split(), check=True)
        assert refusal(fetched) is None


def test_the_group_of_its_own_that_a_user_has_may_change_jars(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian and Ubuntu make users, with a umask of 002."""
    for place in PLACES:
        (fetched / place).chmod((fetched / place).stat().st_mode | 0o020)
    own = os.getegid()
    monkeypatch.setattr(paths.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=own))
    for name, members, is_private in [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False)]:
        found = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(paths.grp, "getgrgid", lambda _, found=found: found)
        assert (refusal(fetched) is None) == is_private, (name, members)
    monkeypatch.setattr(paths.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=own + 1))
    assert f"may be changed by the group {name}" in str(refusal(fetched))


def test_linked_jars_are_used_if_nobody_else_may_change_what_the_link_leads_to(
    fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_is_private", lambda _: False)
    former, linking = fetched / ".halfway", tmp_path / "linking"
    linking.mkdir()
    (linking / "jars").symlink_to(former / "jars")
    monkeypatch.setenv("HALFWAY_HOME", str(linking))
    assert ensure_jars("kafka") == [linking / "jars" / "kafka" / f"slf4j-api-{IN_REACH}.jar"]
    for place in (former, former / "jars", former / "jars" / "kafka"):
        place.chmod(0o777)
        with pytest.raises(SetupError, match=f"{place} may be changed by everybody"):
            ensure_jars("kafka")
        place.chmod(0o1777)
        assert ensure_jars("kafka"), "as /tmp: nobody else may rename what is in it"
        place.chmod(0o755)
    assert ensure_jars("kafka")


def test_jars_are_fetched_for_their_user_whatever_the_umask_is(project: Path) -> None:
    command = [sys.executable, "-c", LOADS_OWN_IVY + "raise SystemExit(main(['kafka']))"]
    subprocess.run(command, cwd=project, check=True, umask=0o000)
    assert ensure_jars("kafka")


@only_root_can
@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_class_archive_where_another_user_may_change_it_is_not_used(fetched: Path, place: str) -> None:
    archive = archive_beside(fetched / PLACES[-1])
    assert use_archive(archive)
    for path in (fetched / place, archive):
        os.chown(path, NOBODY, NOBODY)
        assert use_archive(archive) == []
        os.chown(path, os.geteuid(), os.getegid())
    assert use_archive(archive)


def test_a_class_archive_that_others_may_change_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_is_private", lambda _: False)
    archive = tmp_path / "classes.jsa"
    assert use_archive(archive) == []
    archive.touch(0o600)
    assert use_archive(archive)[0] == f"-XX:SharedArchiveFile={archive}"
    archive.chmod(0o660)
    assert use_archive(archive) == []


@pytest.mark.parametrize("conf", get_args(JarSet))
def test_exactly_the_fetched_jars_are_pinned(conf: JarSet) -> None:
    pinned = {line.split()[1] for line in conf_file("jars.sha256").read_text().splitlines()}
    jars = jars_present(conf)
    if not jars:
        pytest.skip(f"the JARs of {conf} are not in {home()}: `make jars` fetches all but s3, which tests/cluster fetches")
    assert {name for name in pinned if name.startswith(f"{conf}/")} == {f"{conf}/{jar.name}" for jar in jars}


def test_no_other_jars_are_pinned() -> None:
    assert {line.split()[1].partition("/")[0] for line in conf_file("jars.sha256").read_text().splitlines()} == set(get_args(JarSet))


def test_calls_at_the_same_time_fetch_once(project: Path) -> None:
    command = [sys.executable, "-c", LOADS_OWN_IVY + "ensure_jars('kafka')"]
    calls = [subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = "".join(call.communicate()[1] for call in calls)
    assert [call.returncode for call in calls] == [0, 0, 0]
    assert told.count("fetching") == 1


def test_wrong_usage_names_the_sets_of_jars(project: Path) -> None:
    for arguments in ([], ["kafka", "flink"]):
        done = subprocess.run(
            [sys.executable, "-m", "halfway.pipelines.runtime.jars", *arguments],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (2, "usage: python -m halfway.pipelines.runtime.jars {spark,kafka,databases,s3} ...\n")


@pytest.mark.parametrize("line", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "21" 2023-09-19', 'java version "25-ea"'])
def test_java_17_and_newer_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    java_home = java_that_says(tmp_path / "jdk", line)
    monkeypatch.setenv("JAVA_HOME", str(java_home))
    assert find_java() == java_home / "bin" / "java"


@pytest.mark.parametrize(
    ("line", "version"), [('openjdk version "11.0.2"', 11), ('java version "1.8.0_392"', 8), ('openjdk version "16.0.1"', 16)]
)
def test_an_older_java_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, version: int) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path / "jdk", line)))
    with pytest.raises(SetupError, match=f"is Java {version}, Halfway needs 17 or newer: install Java 17"):
        find_java()


def test_a_java_without_a_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path / "jdk", "Unable to locate a Java Runtime.", code=1)))
    with pytest.raises(SetupError, match="prints no version"):
        find_java()


def test_without_java_home_the_path_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_home = java_that_says(tmp_path / "jdk", 'openjdk version "17.0.1"')
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{java_home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert find_java() == java_home / "bin" / "java"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"there is no Java: install Java 17 or newer"):
        find_java()
