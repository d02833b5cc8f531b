"""Kubernetes' manifests and image: they fit Kubernetes' own schemas, and name what exists."""

import os
import re
import shlex
import subprocess
import sys
import venv
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from halfway.pipelines.cli.app import app
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.jars import ensure_jars
from tests.support.fresh_python import build_wheel, copy_source
from tests.support.paths import ROOT

FOLDER = ROOT / "resources" / "kubernetes"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "halfway.yaml").read_text()))
BY_KIND = {each["kind"]: each for each in MANIFESTS}
DRIVER = BY_KIND["StatefulSet"]["spec"]["template"]["spec"]
OPTIMIZE = BY_KIND["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
DOCKERFILE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
LATEST = "1.37"
"""Kubernetes' version; a field that a later one drops fails here when the package is upgraded."""


@pytest.mark.parametrize("manifest", [each for each in MANIFESTS if each["kind"] != "ServiceMonitor"], ids=lambda each: each["kind"])
def test_manifests_fit_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, LATEST, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest | {"specs": {}}, LATEST, strict=True)


def test_the_monitor_finds_the_port_of_the_service() -> None:
    monitor, service = BY_KIND["ServiceMonitor"]["spec"], BY_KIND["Service"]
    assert set(monitor) == {"selector", "endpoints"}
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ["metrics"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    [driver] = DRIVER["containers"]
    assert ports == {port["name"]: port["containerPort"] for port in driver["ports"]}
    conf = spark_conf(driver["args"])
    assert (conf["spark.driver.port"], conf["spark.driver.blockManager.port"]) == (str(ports["driver"]), str(ports["blocks"]))
    assert conf["spark.driver.host"].split(".")[0] == service["metadata"]["name"]
    assert service["spec"]["selector"] == BY_KIND["StatefulSet"]["spec"]["template"]["metadata"]["labels"]


def test_there_is_one_job_and_one_committer_and_a_stranger_is_no_executor() -> None:
    """Kubernetes starts a second pod of a Deployment beside one that was deleted, and S3 refuses no second commit."""
    job = BY_KIND["StatefulSet"]["spec"]
    assert (job["replicas"], job["serviceName"]) == (1, BY_KIND["Service"]["metadata"]["name"])
    assert BY_KIND["CronJob"]["spec"]["suspend"] is True
    conf = spark_conf(DRIVER["containers"][0]["args"])
    names = ("spark.authenticate", "spark.network.crypto.enabled", "spark.io.encryption.enabled")
    assert [conf[name] for name in names] == ["true"] * 3


def test_executors_have_no_rights_in_kubernetes() -> None:
    """They decode bytes of strangers. Who may make pods may read every secret of the namespace."""
    name = spark_conf(DRIVER["containers"][0]["args"])["spark.kubernetes.authenticate.executor.serviceAccountName"]
    [account] = [each for each in MANIFESTS if each["kind"] == "ServiceAccount" and each["metadata"]["name"] == name]
    assert account["automountServiceAccountToken"] is False
    assert name not in [subject["name"] for each in MANIFESTS if each["kind"] == "RoleBinding" for subject in each["subjects"]]


def test_a_command_is_made_from_the_pod_of_the_compaction() -> None:
    [(command, script)] = re.findall(r"""awk -v command="(.*)" '(.*?)'""", PAGE, re.DOTALL)
    text = yaml.safe_dump(BY_KIND["CronJob"]["spec"]["jobTemplate"])
    done = subprocess.run(["awk", "-v", f"command={command}", script], input=text, capture_output=True, text=True, check=True)
    [container] = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"]
    arguments = OPTIMIZE["containers"][0]["args"]
    at = arguments.index("optimize")
    assert container["args"] == [*arguments[:at], "topics", "create", "--partitions=8", "--replication=3", *arguments[at + 1 :]]


def test_delta_for_python_comes_from_the_jar_in_the_image() -> None:
    """In which there is no delta-spark, because that would bring a second PySpark."""
    [path] = re.findall(r"PYTHONPATH=(\S+)", DOCKERFILE)
    [jar] = [Path(each).name for each in path.split(":") if each.startswith("/opt/spark/jars/")]
    [found] = [each for each in ensure_jars("spark") if each.name == jar]
    code = "import delta.tables, delta.exceptions; print(delta.tables.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(found)})
    assert str(found) in done.stdout


def spark_conf(arguments: list[str]) -> dict[str, str]:
    pairs = [value.partition("=") for name, value in pairwise(arguments) if name == "--conf"]
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("pod", [DRIVER, OPTIMIZE], ids=["driver", "optimize"])
def test_the_command_line_is_valid_and_the_settings_load(pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [container] = pod["containers"]
    arguments = container["args"]
    script = arguments.index("/opt/halfway/__main__.py")
    settings_file = tmp_path / "halfway.yaml"
    settings_file.write_text(BY_KIND["ConfigMap"]["data"]["halfway.yaml"])
    [mount] = container["volumeMounts"]
    command, *options = [text.replace(mount["mountPath"], str(tmp_path)) for text in arguments[script + 1 :]]
    for variable in container["env"]:
        if variable["name"].startswith("HALFWAY"):
            monkeypatch.setenv(variable["name"], "secret")
    params = typer.main.get_command(app).commands[command].make_context(command, options).params  # type: ignore[attr-defined]
    settings = command_settings(params["config"], params["overrides"])
    assert settings.kafka.security.user == "secret"
    assert settings.metrics.port == 9095
    conf = spark_conf(DRIVER["containers"][0]["args"])
    assert settings.state.shuffle_partitions == int(conf["spark.executor.instances"]) * int(conf["spark.executor.cores"])


def test_the_page_makes_every_secret() -> None:
    text = (FOLDER / "halfway.yaml").read_text()
    refs = set(re.findall(r"secretKeyRef: \{name: ([\w-]+), key: ([\w-]+)\}", text)) | set(
        re.findall(r"secretKeyRef\.\w+=([\w-]+):([\w-]+)", text)
    )
    made = {
        (name, key)
        for name, file in re.findall(r"kubectl create secret generic ([\w-]+) .*--from-env-file=(\S+)", PAGE)
        for lines in re.findall(rf"`{re.escape(file)}` \((.*?)\)", PAGE, re.DOTALL)
        for key in re.findall(r"`([\w-]+)=", lines)
    }
    assert refs == made
    assert "--from-literal" not in PAGE, "a secret on a command line is in the list of processes"


def test_one_image_everywhere() -> None:
    version = re.search(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert version is not None
    names = set(re.findall(r"REGISTRY/halfway:[\w.]+", (FOLDER / "halfway.yaml").read_text() + PAGE))
    assert names == {f"REGISTRY/halfway:{version[1]}"}
    assert set(re.findall(r"halfway-([\d.]+)-py3", DOCKERFILE + PAGE)) == {version[1]}


def copies() -> list[tuple[list[str], str]]:
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [(sources, target) for *sources, target in map(shlex.split, lines)]


def test_the_image_copies_what_the_builder_gets() -> None:
    allowed = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {source for names, _ in copies() for source in names}
    assert {re.sub(r"halfway-[\d.]+-py3-none-any", "*", source) for source in sources} == allowed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_steps_of_the_image_work_in_a_fresh_directory(tmp_path: Path) -> None:
    """Runs what installs Halfway in the image, with the image's folders below a fresh one."""
    source = copy_source(tmp_path / "source")
    (source / "dist").mkdir()
    build_wheel(source, source / "dist")
    (source / "requirements.lock").write_bytes((ROOT / "requirements.lock").read_bytes())
    run = ["make", "--assume-old=setup", "constraints", f"PY={sys.executable}"]
    subprocess.run(run, cwd=source, check=True, capture_output=True, timeout=200)
    venv.create(tmp_path / "python", with_pip=True)
    python = tmp_path / "python" / "bin" / "python"
    into = tmp_path / "image"
    for names, target in copies():
        if ".halfway/jars" in names[0]:
            continue
        folder = into / target.strip("/")
        folder.mkdir(parents=True)
        for name in names:
            (folder / Path(name).name).write_bytes((source / name).read_bytes())
            (folder / Path(name).name).chmod(0o600)  # as who has a umask of 077 builds
    [install] = [line for line in re.findall(r"^RUN (.+)$", DOCKERFILE, re.MULTILINE) if "pip install" in line]
    script = install.replace("/opt/", f"{into}/opt/").replace("pip install", f"{python} -m pip install")
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    told = subprocess.run(
        [python, "-c", "import halfway, pandas, prometheus_client; print(halfway.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        timeout=60,
    )
    assert "site-packages" in told.stdout


def test_options_of_kubectl_that_need_no_value_get_theirs_with_an_equals_sign() -> None:
    """`--cascade foreground` is `--cascade=background`, and a second object named `foreground`."""
    assert not re.search(r"kubectl [^\n]*--(cascade|dry-run|validate|raw) ", PAGE)
    assert "--cascade=foreground" in PAGE
