"""A commit is held to what `make lint` holds: the hooks run just its commands, in its environment."""

import re

import yaml

from tests.support.paths import ROOT


def lint_commands() -> list[str]:
    """Return the commands of `make lint`, as a shell at the root would run them."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    variables = dict(re.findall(r"^(\w+) := (\S+)$", makefile, re.MULTILINE))
    commands = [line.strip().removeprefix("@") for line in recipe[1].splitlines()]
    for _ in range(2):  # a variable's value may name another one
        commands = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], command) for command in commands]
    return commands


def test_the_hooks_run_what_make_lint_runs() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "nothing is fetched"
    hooks = repository["hooks"]
    assert [hook["entry"] for hook in hooks] == lint_commands()
    for hook in hooks:
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == ("system", False, True)
        assert hook["entry"].startswith(".venv/bin/python -m ")
    assert len({hook["id"] for hook in hooks}) == len(hooks)
