"""Methods of one's own, in files outside the package: named under ``plugins`` in a configuration.

A plug-in is one Python file. Every public subclass of :class:`~flcore.methods.api.Method` in it is checked and
registered beside the package's own methods. In a run's identity it stands by its content, not by its place: a
configuration names file and SHA-256, so that a worker on the same or another machine loads the very same code or none.

What a plug-in imports from `flcore` or from another plug-in (``from protofl_plugins.other import ...``; name that one
first) is followed; other modules that it imports are not part of a run's identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from flcore.config.imports import imported_names
from flcore.config.plugin_places import located as located
from flcore.core.errors import ConfigError, Cure
from flcore.core.loaded_code import EditedError
from flcore.core.params import build, declared
from flcore.core.text import brief
from flcore.io.files import given_path, replace_file
from flcore.methods import METHODS, Method

PACKAGE = "protofl_plugins"
"""Where modules of plug-ins stand, each under its file's name."""

FOLDER = "plugins"
"""Of a run, where the files it was made with are kept."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_lock = threading.RLock()
_methods: dict[str, list[str]] = {}
"""Plug-in → methods registered by it."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plug-in.

    Attributes:
        name: the file's, without ``.py``.
        path: the file, absolute.
        sha256: of its content.
        source: its content.
    """

    name: str
    path: Path
    sha256: str
    source: bytes = field(repr=False, compare=False)

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.name}"

    def to_mapping(self) -> dict[str, str]:
        """Place and content, as JSON values."""
        return {"path": str(self.path), "sha256": self.sha256}


def load(path: str | os.PathLike[str], sha256: str | None = None) -> Plugin:
    """Load a file and register its methods; again, where its content has changed since.

    Args:
        path: the file.
        sha256: of the content it must have; None for any.

    Raises:
        ConfigError: the file is missing or another one, does not run, or has no method that can be used.
        EditedError: this process has loaded the file as it should be, and it was edited since.
    """
    try:
        place = given_path(path).absolute()
        if place.exists() and not place.is_file():
            raise ConfigError(f"plug-in {brief(str(place))}: is no file")  # nor a device, which may never end
        source = place.read_bytes()
    except OSError as error:
        raise ConfigError(f"plug-in {brief(str(path))}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no file can be called so
        raise ConfigError(f"plug-in {brief(str(path))}: cannot be read ({error})") from error
    plugin = Plugin(place.stem, place, hashlib.sha256(source).hexdigest(), source)
    if sha256 not in (None, plugin.sha256):
        if getattr(sys.modules.get(plugin.module), "__plugin__", None) == sha256:
            raise EditedError.of(place)
        raise ConfigError(
            f"plug-in {place}: is not the file that this configuration names (its SHA-256 is {plugin.sha256[:8]}..., "
            f"not {str(sha256)[:8]}...); put that one back, or begin another run with this one"
        )
    with _lock:
        loaded = sys.modules.get(plugin.module)
        if getattr(loaded, "__plugin__", None) != plugin.sha256:
            _execute(plugin, loaded)
    return plugin


def load_all(entries: Any) -> tuple[Plugin, ...]:
    """The plug-ins of a configuration: files, or mappings ``{"path": ..., "sha256": ...}``.

    Raises:
        ConfigError: as :func:`load` says; or an entry is neither, or two files have one name.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"plugins = {brief(entries)}: expected a list of files")
    found: dict[str, Plugin] = {}
    for path, sha256 in map(_entry, entries):
        plugin = load(path, sha256)
        other = found.setdefault(plugin.name, plugin)
        if other.sha256 != plugin.sha256:
            raise ConfigError(f"plugins: {other.path} and {plugin.path} have one name; rename one of them")
    return tuple(found.values())


def keep(plugins: Iterable[Plugin], folder: Path) -> tuple[Plugin, ...]:
    """Copies of plug-ins below a folder, as a run is made with them; whatever happens to the files afterwards."""
    kept = []
    for plugin in plugins:
        copy = folder.absolute() / FOLDER / f"{plugin.name}.py"
        if not copy.is_file() or copy.read_bytes() != plugin.source:
            _write(copy, plugin.source)
        kept.append(dataclasses.replace(plugin, path=copy))
    return tuple(kept)


def _write(path: Path, source: bytes) -> None:
    replace_file(path, lambda file: file.write(source))


def brought(raw: Mapping[str, Any], sources: Mapping[str, bytes], folder: Path) -> dict[str, Any]:
    """A configuration's mapping on another machine: its plug-ins are written below a folder of that machine.

    Args:
        raw: as :meth:`flcore.config.schema.Config.to_mapping` gives it.
        sources: of the plug-ins, by name.
        folder: where they go.
    """
    plugins = [Plugin(name, Path(), hashlib.sha256(source).hexdigest(), source) for name, source in sources.items()]
    entries = [plugin.to_mapping() for plugin in keep(plugins, folder)]
    return {**raw, "plugins": entries} if entries else dict(raw)


def used(plugins: Iterable[Plugin], methods: Iterable[Method]) -> tuple[Plugin, ...]:
    """Those of the plug-ins on which methods depend: by their classes, and by what these plug-ins import.

    Raises:
        ConfigError: a method is a plug-in's that is not among them.
    """
    by_module = {plugin.module: plugin for plugin in plugins}
    waiting = [cls.__module__ for method in methods for cls in type(method).__mro__]
    found: set[str] = set()
    while waiting:
        package, _, rest = waiting.pop().partition(".")
        module = f"{package}.{rest.partition('.')[0]}"
        if package != PACKAGE or module in found:
            continue
        if module not in by_module:
            file = getattr(sys.modules.get(module), "__file__", module)
            raise ConfigError(f"plugins: {file} is needed and not named; {Cure.NAME_PLUGIN}")
        found.add(module)
        waiting += imported_names(by_module[module].source)
    return tuple(plugin for module, plugin in by_module.items() if module in found)


def unload(name: str) -> None:
    """Forget a plug-in and its methods."""
    with _lock:
        for method in _methods.pop(name, []):
            METHODS.remove(method)
        sys.modules.pop(f"{PACKAGE}.{name}", None)


# ----------------------------------------------------------------------------------------------------------- loading


def _entry(entry: Any) -> tuple[str | os.PathLike[str], str | None]:
    if isinstance(entry, str | os.PathLike):
        return entry, None
    if isinstance(entry, Mapping) and entry.keys() == {"path", "sha256"}:
        path, sha256 = entry["path"], entry["sha256"]
        if isinstance(path, str) and isinstance(sha256, str):
            return path, sha256
    raise ConfigError(f"plugins: {brief(entry)}: expected the path of a Python file")


def _execute(plugin: Plugin, before: ModuleType | None) -> None:
    """Run a plug-in's source in a module of its own and register what it defines; all or nothing."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE, "Modules of plug-ins.")
        package.__path__ = []
        sys.modules[PACKAGE] = package
    # Compiled from the bytes that were hashed: Python's own loader trusts a cache by time and size.
    spec = importlib.util.spec_from_file_location(plugin.module, plugin.path)
    module = ModuleType(plugin.module) if spec is None else importlib.util.module_from_spec(spec)
    module.__file__ = str(plugin.path)
    sys.modules[plugin.module] = module  # where dataclasses look up the types of fields
    try:
        _run(plugin, module)
        methods = _checked(plugin, module)
    except BaseException:
        sys.modules.pop(plugin.module)
        if before is not None:
            sys.modules[plugin.module] = before
        raise
    for name in _methods.pop(plugin.name, []):
        METHODS.remove(name)
    for cls in methods:
        METHODS.add(cls.name, cls)
    _methods[plugin.name] = [cls.name for cls in methods]
    vars(module)["__plugin__"] = plugin.sha256


def _run(plugin: Plugin, module: ModuleType) -> None:
    try:
        exec(compile(plugin.source, str(plugin.path), "exec"), vars(module))
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.lineno else str(plugin.path)
        raise ConfigError(f"plug-in {place}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(plugin.path)
        ]
        place = f"{plugin.path}:{lines[-1]}" if lines else str(plugin.path)
        raise ConfigError(f"plug-in {place}: {_in_words(error)}") from error


def _checked(plugin: Plugin, module: ModuleType) -> list[type[Method]]:
    """The methods that a module defines.

    Raises:
        ConfigError: there is none, or one cannot be used.
    """
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == plugin.module
        and not name.startswith("_")
    ]
    if not found:
        raise ConfigError(f"plug-in {plugin.path}: defines no method, that is no public subclass of Method")
    names: set[str] = set()
    for cls in found:
        problem = _problem(cls) or _clash(cls, plugin, names)
        if problem is not None:
            raise ConfigError(f"plug-in {plugin.path}: {cls.__name__} {problem}")
        names.add(cls.name)
    return found


def _problem(cls: type[Method]) -> str | None:
    """What keeps a class from being used as a method, in words."""
    for attribute in ("name", "summary", "citation"):
        value = vars(cls).get(attribute)
        if not isinstance(value, str) or not value.strip():
            return f'has no {attribute} of its own; write {attribute}: ClassVar[str] = "..."'
    if not _NAME.fullmatch(cls.name):
        return f"is called {cls.name!r}; a name is made of a-z, 0-9 and _, a letter first"
    if inspect.isabstract(cls):
        return f"does not answer {', '.join(sorted(cls.__abstractmethods__))}"
    if "__dataclass_fields__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        return "is no frozen dataclass; write @dataclass(frozen=True) above it"
    loose = [found.name for found in _fields(cls) if "help" not in found.metadata]
    if loose:
        return f"declares {', '.join(loose)} without flcore.core.params.param, or means a ClassVar"
    try:
        method = build(cls, {parameter.name: parameter.default for parameter in declared(cls)}, cls.name)
        method.stages()
    except Exception as error:
        return f"cannot be made with its own defaults: {_in_words(error)}"
    return None


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _clash(cls: type[Method], plugin: Plugin, names: set[str]) -> str | None:
    if cls.name in names:
        return f"is called {cls.name} like another method of the file"
    if cls.name in METHODS and cls.name not in _methods.get(plugin.name, []):
        return f"is called {cls.name}, and there is a method called so already; choose another name"
    return None


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".rstrip(": ")
