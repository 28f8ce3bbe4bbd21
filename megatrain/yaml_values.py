"""YAML as run files have it: numbers as everyone writes them, values that JSON can say, and no larger than it looks.

Note: why there are no aliases. One of an alias of an alias … makes gigabytes of a page of text ("billion laughs"), and
what a run is asked to do should be read where it stands.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml


class AliasError(ValueError):
    """YAML that says "as above" (*name); refused before it is followed."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 3e-5 for a string, as it wants a point; everyone who writes a learning rate means a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise AliasError(
                f"line {alias.start_mark.line + 1} holds the alias *{alias.anchor}, and a run file takes none: "
                "write the value out where it is meant"
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that the loader would take for a number, and writes out what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parsed(text: str) -> Any:
    """The values in `text`; ValueError for what is no YAML or nobody could print, AliasError for an alias."""
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str, ensure_ascii=False).encode()
    except AliasError:
        raise
    except UnicodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    except Exception as error:  # PyYAML lets nearly everything through that its conversions raise
        raise ValueError(str(error) or type(error).__name__) from None
    return value


def written(values: Any) -> str:
    """Plain values as YAML that `parsed` reads as the same, keys in their order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
