"""Load a user's own methods, data sources, partitioners, models and client samplers.

The code is a file listed under ``plugins``, or an importable module: the keys of :data:`KINDS` accept ``module:Class``.
Every public subclass of a base class in :data:`KINDS` is checked and registered.

A configuration stores path and SHA-256 of each file, so that every worker runs the same code. A run's identity has the
hashes of the files that it uses, of other listed files that these import (``from protofl_plugins.other import ...``),
and of a module's own top-level package. Other imports are not tracked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from flcore.config.imports import closure
from flcore.config.stored import PLUGIN_FOLDER
from flcore.core.errors import ConfigError, Cure
from flcore.core.loaded_code import EditedError
from flcore.core.params import build, declared
from flcore.core.registry import Registry
from flcore.core.text import shorten
from flcore.data.partitioners import PARTITIONERS
from flcore.data.partitioners.base import Partitioner
from flcore.data.sources import SOURCES
from flcore.data.sources.base import Source
from flcore.io.files import given_path, replace_file
from flcore.methods import METHODS, Method
from flcore.models import MODELS, ModelSpec
from flcore.sampling import SAMPLERS
from flcore.sampling.base import Sampler

PACKAGE = "protofl_plugins"
"""Parent package of the modules that are made of files."""

KINDS: tuple[tuple[Registry[Any], type, str], ...] = (
    (METHODS, Method, "method.name"),
    (METHODS, Method, "method.base"),
    *((METHODS, Method, f"compare.{key}") for key in ("methods.*", "baseline", "variants.*.method")),
    (SOURCES, Source, "data.name"),
    (PARTITIONERS, Partitioner, "partition.name"),
    (MODELS, ModelSpec, "model.name"),
    (SAMPLERS, Sampler, "federation.sampler"),
)
"""Registries, the base class of their entries, and the configuration keys that name an entry; ``*`` is any key."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_lock = threading.RLock()


@dataclass(frozen=True)
class Plugin:
    """A module of user code: its name for imports, absolute path, SHA-256 and content."""

    module: str
    path: Path
    sha256: str
    source: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: str, path: Path, source: bytes) -> Plugin:
        """Return the plug-in with this source."""
        return cls(module, path, hashlib.sha256(source).hexdigest(), source)

    @property
    def name(self) -> str:
        """The file's name without ``.py``, or the importable module's name."""
        return self.module.removeprefix(f"{PACKAGE}.")

    @property
    def is_loaded(self) -> bool:
        return getattr(sys.modules.get(self.module), "__plugin__", None) == self.sha256

    def to_mapping(self) -> dict[str, str]:
        """Return path and hash as JSON values, and the name of an importable module."""
        mapping = {"path": str(self.path), "sha256": self.sha256}
        return mapping if self.name != self.module else {**mapping, "module": self.module}


def load(path: str | os.PathLike[str]) -> Plugin:
    """Load one file, as :func:`load_all` does."""
    return load_all([path])[0]


def load_all(entries: Any) -> tuple[Plugin, ...]:
    """Load and register paths, or mappings from :meth:`Plugin.to_mapping`; load edited files again.

    Raises:
        ConfigError: an entry is invalid or not usable, or two files have the same name.
        EditedError: a file was edited after this process loaded it with the hash that is asked for.
    """
    entries = () if entries is None else entries
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"plugins = {shorten(entries)}: expected a list of files")
    by_name: dict[str, Plugin] = {}
    for plugin in map(_read, entries):
        other = by_name.setdefault(plugin.name, plugin)
        if (other.module, other.sha256) != (plugin.module, plugin.sha256):
            raise ConfigError(f"plugins: {other.path} and {plugin.path} have one name; rename one of them")
    plugins = tuple(by_name.values())
    _load(plugins)
    return plugins


def with_classes(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Plugin, ...]]:
    """Load all plug-ins of a configuration, and replace each ``module:Class`` by the registered name.

    Raises:
        ConfigError: a module or class does not exist or is not usable.
    """
    plugins = {plugin.module: plugin for plugin in load_all(raw.get("plugins"))}

    def registered(registry: Registry[Any], key: str, value: Any) -> Any:
        if not isinstance(value, str) or not _CLASS.fullmatch(value):
            return value
        module, _, name = value.partition(":")
        modules = _modules(module, f"{key} = {value}")
        _load(modules)
        cls = getattr(importlib.import_module(module), name, None)
        entry = str(getattr(cls, "name", ""))
        if entry not in registry or registry[entry] is not cls:
            raise ConfigError(f"{key} = {value}: there is no {registry.kind} called {name} in {module}")
        for plugin in modules:
            plugins.setdefault(plugin.module, plugin)
        return entry

    result: Any = dict(raw)
    for registry, _, key in KINDS:
        result = _with_changed(result, key.split("."), partial(registered, registry, key))
    return result, tuple(plugins.values())


def _with_changed(values: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Return nested values with those at a path changed; ``*`` in a path is every key or index."""
    if not path:
        return change(values)
    if isinstance(values, Mapping):
        return {k: _with_changed(v, path[1:], change) if path[0] in (k, "*") else v for k, v in values.items()}
    is_list = isinstance(values, list | tuple) and path[0] == "*"
    return [_with_changed(value, path[1:], change) for value in values] if is_list else values


def used(plugins: Iterable[Plugin], entries: Iterable[object]) -> tuple[Plugin, ...]:
    """Return the plug-ins of registry entries: modules of their classes, imports of these, and all of their packages.

    Raises:
        ConfigError: a needed plug-in is not in ``plugins``.
    """
    by_module = {plugin.module: plugin for plugin in plugins}
    classes = {cls.__module__ for entry in entries for cls in type(entry).__mro__}

    def source_of(module: str) -> bytes | None:
        if module in by_module:
            return by_module[module].source
        if module in Finder.sources and (module in classes or module.startswith(f"{PACKAGE}.")):
            raise ConfigError(f"plugins: {Finder.sources[module].path} is needed and not named; {Cure.NAME_PLUGIN}")
        return None

    modules = closure(classes, source_of)
    packages = {module.partition(".")[0] for module in modules} - {PACKAGE}
    return tuple(p for p in by_module.values() if p.module in modules or p.module.partition(".")[0] in packages)


def keep(plugins: Iterable[Plugin], folder: Path) -> tuple[Plugin, ...]:
    """Copy plug-ins into ``folder/plugins``, and return these copies."""
    home = folder.absolute() / PLUGIN_FOLDER
    copies = tuple(dataclasses.replace(plugin, path=home / f"{plugin.name}.py") for plugin in plugins)
    for copy in copies:
        if not copy.path.is_file() or copy.path.read_bytes() != copy.source:
            replace_file(copy.path, methodcaller("write", copy.source))
    return copies


def brought(raw: Mapping[str, Any], sources: Mapping[str, bytes], folder: Path) -> dict[str, Any]:
    """Write plug-ins from another machine, by module, into ``folder``; return its configuration with the new paths."""
    plugins = keep((Plugin.of(module, Path(), source) for module, source in sources.items()), folder)
    return {**raw, "plugins": [plugin.to_mapping() for plugin in plugins]} if plugins else dict(raw)


def _read(entry: Any) -> Plugin:
    if isinstance(entry, str | os.PathLike):
        entry = {"path": os.fspath(entry)}
    elif not isinstance(entry, Mapping) or not {"path", "sha256"} <= entry.keys() <= {"path", "sha256", "module"}:
        entry = {"path": None, "entry": entry}
    if not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError(f"plugins: {shorten(entry.get('entry', entry))}: expected the path of a Python file")
    name = f"plug-in {shorten(entry['path'])}"
    try:
        path = given_path(entry["path"]).absolute()
        if path.exists() and not path.is_file():
            raise ConfigError(f"{name}: is not a file")  # reading a device may never end
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        raise ConfigError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    plugin, sha256 = Plugin.of(entry.get("module", f"{PACKAGE}.{path.stem}"), path, source), entry.get("sha256")
    if sha256 not in (None, plugin.sha256):
        if dataclasses.replace(plugin, sha256=sha256).is_loaded:
            raise EditedError.of(path)
        hashes = f"SHA-256 {plugin.sha256[:8]}..., not {sha256[:8]}..."
        cure = "restore the file, or start a new run with it"
        raise ConfigError(f"plug-in {path}: has another content than this configuration names ({hashes}); {cure}")
    return plugin


def _modules(module: str, key: str) -> list[Plugin]:
    """Return a module and its imports from its own top-level package; nothing for modules of `flcore`."""
    top, modules = module.partition(".")[0], dict[str, Plugin]()

    def source_of(name: str) -> bytes | None:
        if name.partition(".")[0] != top or (path := _file_of(name)) is None:
            return None
        modules[name] = Plugin.of(name, path, path.read_bytes())
        return modules[name].source

    if top == "flcore":
        return []
    try:
        closure([module], source_of, lambda name: modules[name].path.name == "__init__.py")
    except SyntaxError as error:
        path = list(modules.values())[-1].path
        raise ConfigError(f"{key}: {path}:{error.lineno}: {error.msg}") from error
    if module not in modules:
        raise ConfigError(f"{key}: there is no Python module {module}; install it, or set PYTHONPATH to its folder")
    return sorted(modules.values(), key=lambda plugin: plugin.module)


def _file_of(module: str) -> Path | None:
    if module in Finder.sources and Finder.sources[module].path.is_file():
        return Finder.sources[module].path
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
    return None


class Finder:
    """Import plug-ins from the hashed bytes; Python's loader trusts a cache by time and size."""

    sources: ClassVar[dict[str, Plugin]] = {}

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        plugin, is_package = cls.sources.get(name), any(module.startswith(f"{name}.") for module in cls.sources)
        if plugin is None and (not is_package or (name != PACKAGE and PathFinder.find_spec(name, path))):
            return None
        spec = importlib.util.spec_from_loader(name, cls(), is_package=is_package)  # type: ignore[arg-type]
        if spec is not None and is_package and plugin is not None and plugin.path.name == "__init__.py":
            spec.submodule_search_locations = [str(plugin.path.parent)]  # for modules that are no plug-ins
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if (plugin := self.sources.get(module.__name__)) is not None:
            module.__file__ = str(plugin.path)
            exec(compile(plugin.source, str(plugin.path), "exec"), vars(module))
            vars(module)["__plugin__"] = plugin.sha256


sys.meta_path.insert(0, Finder())


def _load(plugins: Sequence[Plugin]) -> None:
    """Import and register plug-ins, all or none of them; if one has changed, load all of them again."""
    names = {plugin.module for plugin in plugins}
    with _lock:
        if all(plugin.is_loaded for plugin in plugins):
            return
        tables: list[dict[str, Any]] = [Finder.sources, *(registry.added for registry, *_ in KINDS)]
        before = [dict(table) for table in tables]
        modules = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
        try:
            for registry, *_ in KINDS:
                for name in [name for name, cls in registry.added.items() if cls.__module__ in names]:
                    del registry.added[name]
            Finder.sources.update({plugin.module: plugin for plugin in plugins})
            for plugin in plugins:
                _register(plugin, _import(plugin))
        except BaseException:
            for table, content in zip(tables, before, strict=True):
                table.clear()
                table.update(content)
            for name in names & sys.modules.keys():
                del sys.modules[name]
            sys.modules.update(modules)
            raise


def _import(plugin: Plugin) -> ModuleType:
    try:
        return importlib.import_module(plugin.module)
    except SyntaxError as error:
        line = f"{error.filename}:{error.lineno}" if error.lineno else str(plugin.path)
        raise ConfigError(f"plug-in {line}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(plugin.path)]
        raise ConfigError(f"plug-in {plugin.path}{''.join(lines[-1:])}: {_in_words(error)}") from error


def _register(plugin: Plugin, module: ModuleType) -> None:
    bases = {base: registry for registry, base, _ in KINDS}
    public = [cls for name, cls in vars(module).items() if isinstance(cls, type) and not name.startswith("_")]
    defined = [cls for cls in public if cls.__module__ == plugin.module]
    classes = [(registry, cls) for cls in defined for base, registry in bases.items() if base in cls.__mro__]
    if not classes and plugin.module.startswith(f"{PACKAGE}."):
        names = ", ".join(base.__name__ for base in bases)
        raise ConfigError(f"plug-in {plugin.path}: defines no public subclass of {names}")
    for registry, cls in classes:
        if problem := _problem_of(registry, cls):
            raise ConfigError(f"plug-in {plugin.path}: {cls.__name__} {problem}")
        registry.added[cls.name] = cls  # type: ignore[attr-defined]


def _problem_of(registry: Registry[Any], cls: Any) -> str | None:
    for attribute in ("name", "summary", *(["citation"] if registry is METHODS else [])):
        value = vars(cls).get(attribute)
        if not isinstance(value, str) or not value.strip():
            return f'has no {attribute} of its own; write {attribute}="..." in the class statement'
    if not _NAME.fullmatch(cls.name):
        return f"is called {cls.name!r}; a name is made of a-z, 0-9 and _, a letter first"
    if cls.name in registry:
        return f"is called {cls.name}, and there is a {registry.kind} called so already; choose another name"
    if inspect.isabstract(cls):
        return f"does not define {', '.join(sorted(cls.__abstractmethods__))}"
    if "__dataclass_fields__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        return "is no frozen dataclass; write @dataclass(frozen=True) above it"
    if plain := [field.name for field in dataclasses.fields(cls) if "help" not in field.metadata]:
        return f"declares {', '.join(plain)} without flcore.core.params.param, or means a ClassVar"
    try:
        entry = build(cls, {parameter.name: parameter.default for parameter in declared(cls)}, cls.name)
        if isinstance(entry, Method):
            entry.server_steps()
    except Exception as error:
        return f"cannot be made with its own defaults: {_in_words(error)}"
    return None


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".rstrip(": ")
