"""requirements.lock pins each requirement to one version with hashes, and these versions are installed."""

import re
from importlib import metadata

from tests.support.paths import ROOT

LOCK = ROOT / "requirements.lock"
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([^\s;]+)(?: ; [^\\]+)?((?: --hash=sha256:[0-9a-f]{64})*)")


def requirements() -> list[tuple[str, str, str]]:
    """Return name, version and hashes of each requirement. Fails if a line is no requirement."""
    lines = [line for line in LOCK.read_text().replace("\\\n", " ").splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = [(line, REQUIREMENT.fullmatch(" ".join(line.split()))) for line in lines]
    assert [line for line, match in found if match is None] == []
    return [(match[1], match[2], match[3]) for _, match in found if match is not None]


def test_every_requirement_is_one_version_with_its_hashes() -> None:
    assert len(requirements()) > 50
    assert [name for name, _, hashes in requirements() if not hashes] == []


def test_the_installed_versions_are_the_locked_ones() -> None:
    locked = {name: version for name, version, _ in requirements()}
    assert {name: metadata.version(name) for name in locked} == locked
