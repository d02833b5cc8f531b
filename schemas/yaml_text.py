"""Reads YAML as settings need it: a name that occurs twice is refused, where PyYAML would drop the first value.

Only plain decimal numbers are numbers, and all else is a text, which each setting reads by its own rule. In YAML 1.1,
which PyYAML reads, `1:30` is 90 and `0600` is 384: as a duration or the name of a group, each would be something else
than it looks like. PyYAML's own errors may hold a value, which may be a secret.
"""

import re
from typing import Any

import yaml


class NameTwiceError(yaml.MarkedYAMLError):
    """A name occurs twice in a mapping."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, for mappings whose keys differ."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node.

        Raises:
            NameTwiceError: a key occurs twice.
        """
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            raise NameTwiceError(problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBERS = {
    "tag:yaml.org,2002:int": (re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), "-+0123456789"),
    "tag:yaml.org,2002:float": (re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*)$"), "-+.0123456789"),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in _NUMBERS] for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _tag, (_form, _first) in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _form, list(_first))


def read_yaml(text: str) -> object:
    """Return what a YAML text says.

    Raises:
        NameTwiceError: a name occurs twice in a mapping.
        YAMLError: it is not YAML, or a value is not what it looks like: a date of month 13, a tag such as `!secret`.
    """
    try:
        return yaml.load(text, _Loader)  # a subclass of SafeLoader
    # Of what makes a value from its text, and quotes it; of too many brackets.
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise yaml.YAMLError from None
