"""``protofl check method``: the checks of :mod:`flcore.testing` on a registered method or on a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError
from flcore.core.text import unknown_key

if TYPE_CHECKING:
    from flcore.methods.api import Method

_WIDTH = 13


def checked(name: str, assignments: Sequence[str], *, slow: bool) -> Iterator[dict[str, Any]]:
    """Yield the results of the checks of a method, or of those in a file, as JSON values.

    ``slow`` also trains in a worker process.

    Raises:
        ConfigError: the method or file does not exist, or a value cannot be used.
    """
    from flcore.testing import check_method
    from pipelines.plan.params import override

    raw = {section: dict(values) for section, values in override({}, assignments).items()}
    params = raw.pop("method", {})
    for cls in _classes(name):
        for one in check_method(cls, raw, slow=slow, stop=False, **params):
            yield {
                "method": cls.name,
                "check": one.check,
                "result": "failed" if one.problem else "skipped" if one.reason else "passed",
                "finding": one.problem or one.reason,
                "meaning": one.meaning,
            }


def _classes(name: str) -> list[type[Method]]:
    from flcore.config import plugins
    from flcore.methods import METHODS

    if name in METHODS:
        return [METHODS[name]]
    if not name.endswith(".py"):
        raise ConfigError(f"check method: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
    module = plugins.load(name).module
    return [cls for cls in METHODS.values() if cls.__module__ == module]


def lines(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a heading per method and a line per check."""
    for name in dict.fromkeys(one["method"] for one in outcomes):
        checks = [one for one in outcomes if one["method"] == name]
        results = Counter(one["result"] for one in checks)
        yield f"{name}: {results['passed']} of {len(checks) - results['skipped']} checks passed"
        for one in checks:
            yield f"  {one['result']:7} {one['check']:{_WIDTH}} {one['finding'] or one['meaning']}"
