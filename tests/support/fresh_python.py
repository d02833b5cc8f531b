"""An environment with everything that Halfway depends on, and without Halfway; and the wheel to install there."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Container
from pathlib import Path

from tests.support.paths import ROOT


def make_fresh_python(folder: Path, *, without: Container[str] = ()) -> Path:
    """Make a virtual environment and return its interpreter. `without` names packages that are left out.

    Links, not a .pth file, which could leave out no package, nor an editable Halfway.
    """
    venv.create(folder, with_pip=False)
    for packages in {Path(path).resolve() for path in sys.path if path.endswith("site-packages")}:
        for entry in packages.iterdir():
            if entry.suffix != ".pth" and "halfway" not in entry.name and entry.name.split("-")[0] not in without:
                (site_packages(folder) / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    needed = [name for name in ("pandas", "confluent_kafka", "pydantic", "pyspark") if name not in without]
    modules = f"import {', '.join(needed)}; import halfway"
    found = subprocess.run([str(python), "-c", modules], check=False, capture_output=True, text=True, cwd=folder, env={})
    assert "No module named 'halfway'" in found.stderr
    return python


def site_packages(folder: Path) -> Path:
    """Return where a virtual environment has its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree, as README says, into `folder`."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("halfway-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel of pure Python in a virtual environment: its files are laid out as they are installed."""
    zipfile.ZipFile(wheel).extractall(site_packages(folder))


def copy_source(folder: Path, *, links: bool = True) -> Path:
    """Clone the repository as it is committed, and lay the files that are changed or new over it.

    Args:
        folder: where to.
        links: False for a checkout without symbolic links, in which a link is a text file.
    """
    command = ["git", "clone", "--quiet", "--config", f"core.symlinks={str(links).lower()}", str(ROOT), str(folder)]
    subprocess.run(command, check=True, timeout=60)
    listed = subprocess.run(
        ["git", "ls-files", "--modified", "--others", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
    return folder
