"""What is installed is one package, `halfway`, wherever it is installed (docs/architecture.md)."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.fresh_python import copy_source, install, make_fresh_python
from tests.support.layers import FOLDERS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("python")
    interpreter = make_fresh_python(folder)
    install(wheel, folder)
    return interpreter


def run(python: Path, code: str, folder: Path, **environ: str) -> str:
    done = subprocess.run([str(python), "-c", code], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_one_package_with_every_module_and_file(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"halfway"}
    shipped = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    face = [f"halfway/{name}" for name in ("__init__.py", "__main__.py", "py.typed", "testing.py")]
    assert names == {*face, *(f"halfway/{path.relative_to(ROOT)}" for path in shipped)}


def test_it_lives_beside_an_application_with_packages_of_the_same_names(python: Path, tmp_path: Path) -> None:
    for name in ("schemas", "clients", "pipelines", "transforms", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'application of {name}'\n")
    code = (
        "import schemas, clients, pipelines, transforms, conf, halfway\n"
        "from halfway import TransactionProducer, load_settings\n"
        "print(schemas.OWNER, clients.OWNER, TransactionProducer.__module__, load_settings().kafka.half_topic, sep='|')"
    )
    told = "application of schemas|application of clients|halfway.clients.producer|transactions.half"
    assert run(python, code, tmp_path) == told


def test_a_checkout_without_links_on_the_path_does_not_hide_the_wheel(python: Path, tmp_path: Path) -> None:
    """A Git folder of Databricks: its root is on the path, and symbolic links are text files."""
    checkout = copy_source(tmp_path / "checkout", links=False)
    assert (checkout / "src" / "halfway" / "schemas").read_text() == "../../schemas"
    code = "import halfway.conf.loader; from notebooks import page; print(halfway.__file__, page.__file__, sep='|')"
    package, page = run(python, code, tmp_path, PYTHONPATH=str(checkout)).split("|")
    assert "site-packages" in package
    assert Path(page).is_relative_to(checkout)


@pytest.mark.parametrize("module", ["halfway", "pipelines", "halfway.pipelines"])
def test_the_command_runs_by_module_name(python: Path, tmp_path: Path, module: str) -> None:
    folder = ROOT if module == "pipelines" else tmp_path
    command = [str(python), "-m", module, "--help"]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "resolve" in done.stdout


def test_what_runs_before_anything_is_installed_needs_nothing_installed(tmp_path: Path) -> None:
    """The Makefile asks for Java with the machine's own Python."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import halfway.pipelines.runtime.java, halfway.schemas.errors"
    done = subprocess.run(
        ["python3", "-I", "-S", "-c", code, str(ROOT / "src")], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
