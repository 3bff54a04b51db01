"""Python values as YAML that a person can read."""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Keeps the order of keys, repeats what is shared, and writes text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.Dumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(data: dict[str, Any]) -> str:
    """One YAML document."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=1000)
