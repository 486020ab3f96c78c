"""YAML files into typed, frozen dataclasses; every mistake is reported with file, line and key.

The parser is ruamel.yaml with the settings that DVC uses (YAML 1.2), so ``1e-2`` is a number, ``no`` is a
string and a key given twice is an error, in our code as in ``dvc.yaml``'s templates. The types are plain
dataclasses; pydantic validates them (unknown keys forbidden, no silent conversion) and a ``__post_init__``
that raises ValueError checks ranges.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from pipeline.errors import ConfigError

T = TypeVar("T")
Location = tuple[str | int, ...]
# Put this on a dataclass as ``__pydantic_config__`` to have it validated strictly.
STRICT = {"extra": "forbid", "strict": True}


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as DVC sees it. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", "run the command in the project's root folder") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}", "save the file as UTF-8") from error
    try:
        return YAML(typ="safe").load(text)
    except DuplicateKeyError as error:
        found = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem))
        key = found.group(1) if found else "?"
        line = error.problem_mark.line + 1
        raise ConfigError(f"{path}:{line}: {key}: this key stands twice", "keep one of the two") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem or error.context}", "correct this line") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}", "correct the file") from error


def load_typed(path: Path, kind: type[T], section: str | None = None) -> T:
    """Reads ``path`` (or only its top-level key ``section``) into the dataclass ``kind``.

    Raises ConfigError whose message starts with ``file:line: key:``.
    """
    content = load_yaml(path)
    prefix: Location = ()
    if section is not None:
        prefix = (section,)
        content = content.get(section) if isinstance(content, Mapping) else None
    if content is None:
        content = {}
    _refuse_non_json(path, content, prefix)
    try:
        # JSON is the strict mode with the natural conversions of YAML: list to tuple, number to Decimal.
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        location = prefix + tuple(problem["loc"])
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "value_error" and (named := re.match(r"([a-z_.]+): (.*)", message, re.DOTALL)):
            location += tuple(named.group(1).split("."))  # a __post_init__ names the key that it refuses
            message = named.group(2)
        if problem["type"] == "extra_forbidden" or problem["type"] == "unexpected_keyword_argument":
            message = "unknown key"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(
            f"{path}:{line_of(path, location)}: {dotted(location)}: {message}{more}",
            f"correct this key; docs/{path.stem}.md lists the keys of {path.name}",
        ) from error


def dotted(location: Location) -> str:
    """``('eval', 'items', 0)`` as ``eval.items.0``."""
    return ".".join(map(str, location)) or "(top level)"


def line_of(path: Path, location: Location) -> int:
    """The 1-based line of the key at ``location``, or of its nearest parent that is in the file."""
    node: Node | None = YAML(typ="rt").compose(path.read_text(encoding="utf-8"))
    line = 1
    for part in location:
        if isinstance(node, MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(part)]
            if not pairs:
                return line
            key, node = pairs[0]
            line = key.start_mark.line + 1
        elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line


def _refuse_non_json(path: Path, value: Any, location: Location) -> None:
    """Dates, NaN, infinities and non-string keys have no place in these files."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                line = line_of(path, (*location, str(key)))
                raise ConfigError(f"{path}:{line}: {dotted(location)}: key {key!r} is not text", "quote the key")
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    elif not isinstance(value, str | int | float | bool | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        line = line_of(path, location)
        raise ConfigError(
            f"{path}:{line}: {dotted(location)}: {value!r} is not text, a finite number or a truth value",
            "quote it if it is meant as text",
        )
    for key, child in children:
        _refuse_non_json(path, child, (*location, key))
