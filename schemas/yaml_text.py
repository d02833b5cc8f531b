"""Reads YAML as settings need it: a name that occurs twice is refused, where PyYAML would drop the first value.

PyYAML's own errors may hold a value, which may be a secret.
"""

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


def read_yaml(text: str) -> object:
    """Return what a YAML text says.

    Raises:
        NameTwiceError: a name occurs twice in a mapping.
        YAMLError: it is not YAML, or a value is not what it looks like: a date of month 13, a tag such as `!secret`.
    """
    try:
        return yaml.load(text, _Loader)  # a subclass of SafeLoader
    except (ValueError, KeyError, AttributeError, TypeError):  # of what makes a value from its text, and quotes it
        raise yaml.YAMLError from None
