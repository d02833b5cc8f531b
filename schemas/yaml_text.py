"""Reads YAML as settings need it: a name that occurs twice is refused, where PyYAML would drop the first value."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, for mappings whose keys differ."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node.

        Raises:
            YAMLError: a key occurs twice.
        """
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            raise yaml.constructor.ConstructorError(None, None, "a name occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> object:
    """Return what a YAML text says.

    Raises:
        YAMLError: it is not YAML, or a name occurs twice in a mapping. `problem` and `problem_mark` tell more.
    """
    return yaml.load(text, _Loader)  # a subclass of SafeLoader
