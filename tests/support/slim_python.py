"""A fresh environment with the packages that one install of Halfway brings, and nothing else."""

import venv
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.fresh_python import site_packages
from tests.support.paths import ROOT


def requirements_of(*extras: str) -> list[Requirement]:
    """Return what setup.cfg requires, with these extras."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["install_requires"].splitlines()
    for extra in extras:
        listed += setup["options.extras_require"][extra].splitlines()
    return [Requirement(line) for line in listed if line.strip() and not line.startswith("#")]


def brought_by(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Return name → each distribution that these requirements bring, as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    left = list(requirements)
    while left:
        requirement = left.pop()
        extras = {"extra": ""} if not requirement.extras else {"extra": next(iter(requirement.extras))}
        name = requirement.name.lower().replace("_", "-")
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate(extras):
                left.append(needed)
    return found


def make_slim_python(folder: Path, *extras: str) -> Path:
    """Make a virtual environment with Halfway's requirements for these extras, by links, and return its interpreter."""
    venv.create(folder, with_pip=False)
    for distribution in brought_by(requirements_of(*extras)).values():
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = site_packages(folder) / top
            source = Path(str(distribution.locate_file(top)))
            if not link.exists():
                link.symlink_to(source)
    return folder / "bin" / "python"


def size_of(*extras: str) -> int:
    """Return how many bytes an install brings, without compiled files of Python."""
    return sum(
        Path(str(file.locate())).stat().st_size
        for distribution in brought_by(requirements_of(*extras)).values()
        for file in distribution.files or []
        if file.suffix != ".pyc" and Path(str(file.locate())).is_file()
    )
