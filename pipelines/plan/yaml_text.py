"""A YAML reader with limits: a few lines can expand to more values than fit into memory.

Plain words are read as YAML 1.2, as DVC and editors do: ``1e-3`` is a number, ``yes`` and ``1_000`` are text. The
result has JSON's types only: mappings, lists, text, numbers, booleans and null, without cycles.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from flcore.core.text import is_control, shorten

if TYPE_CHECKING:
    import yaml

LONGEST = 1_000_000
"""Maximum number of characters of a text."""

_MOST_VALUES = 50_000  # with aliases expanded
_DEEPEST = 30
_LARGEST = 2**63 - 1

_DIGITS = "-+.0123456789"
# Tag, pattern and first characters; the first that matches applies.
_PLAIN = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*|0x[0-9A-Fa-f]+)", _DIGITS),
    ("float", r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", _DIGITS),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _DIGITS),
    ("merge", r"<<", "<"),
)


def parse(text: str) -> Any:
    """Return the value of one YAML document; None for an empty one.

    Raises:
        ValueError: it is not YAML, or too large for a parameter file; the message is one line.
    """
    import yaml  # takes a third of the time of `protofl --help`

    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        loader = _reader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, ())
        value = loader.construct_document(node)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(_problem(error)) from None  # its own message repeats a part of the text
    # The constructors accept invalid dates, wrong tags, and numbers of thousands of digits.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(shorten(str(error)) or "a value that cannot be read") from error
    _check_plain(value)
    return value


def write(value: Any) -> str:
    """Return a value as YAML that :func:`parse` reads as the same value, keys in their order."""
    import yaml

    class Writer(yaml.SafeDumper):
        yaml_implicit_resolvers = _reader().yaml_implicit_resolvers

    return yaml.dump(value, Dumper=Writer, sort_keys=False)


@cache
def _reader() -> type[yaml.SafeLoader]:
    import yaml

    class Reader(yaml.SafeLoader):
        pass

    Reader.yaml_implicit_resolvers = {}  # without the resolvers of YAML 1.1
    for tag, pattern, first in _PLAIN:
        Reader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), list(first))
    return Reader


def _problem(error: yaml.YAMLError) -> str:
    """Return the error and its position, without the text around it, which may be an address with a password."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return f"{problem or getattr(error, 'reason', None) or 'a text that YAML does not have'}{where}"


def _count(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Return the number of values in a node, with aliases expanded.

    ``known`` has the counts of nodes seen before, ``above`` the node's parents.

    Raises:
        ValueError: too many or too deep values, a cycle, or a duplicate key.
    """
    import yaml

    if id(node) in above:
        raise ValueError(f"line {node.start_mark.line + 1}: an alias stands for what it is in")
    if len(above) > _DEEPEST:
        raise ValueError(f"line {node.start_mark.line + 1}: nested more than {_DEEPEST} levels deep")
    if id(node) in known:
        return known[id(node)]
    inside = (*above, id(node))
    count = 1
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        count += sum(_count(key, known, inside) + _count(value, known, inside) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_count(item, known, inside) for item in node.value)
    if count > _MOST_VALUES:
        raise ValueError(f"line {node.start_mark.line + 1}: stands for more than {_MOST_VALUES} values")
    known[id(node)] = count
    return count


def _refuse_twice(node: yaml.MappingNode) -> None:
    """Refuse duplicate keys, which YAML forbids; the reader here would take the last one."""
    seen = set()
    for key, _ in node.value:
        name = (key.tag, key.value) if isinstance(key.value, str) else None
        if name in seen:
            raise ValueError(f"line {key.start_mark.line + 1}: {shorten(key.value)} appears twice")
        if name is not None and not key.tag.endswith(":merge"):
            seen.add(name)


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, own in value.items():
            _check_plain(key)
            _check_plain(own)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif isinstance(value, str):
        if any(map(is_control, value)):
            raise ValueError(f"control characters in {shorten(value, 60)}")
    elif type(value) is int and abs(value) > _LARGEST:
        raise ValueError(f"{shorten(value)} is too large; the largest whole number is {_LARGEST}")
    elif not isinstance(value, int | float | None):
        raise ValueError(f"{shorten(value, 60)} is read as a {type(value).__name__}; put it in quotes if it is text")
