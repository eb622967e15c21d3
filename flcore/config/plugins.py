"""Code from outside the package: methods, data sources, partitioners, models and client samplers of a user's own.

It comes from a file that is named under ``plugins``, or from an importable module: every ``name`` of a section, and
``federation.sampler``, may be ``module:Class``. Every public subclass of :class:`~flcore.methods.api.Method`,
:class:`~flcore.data.sources.base.Source`, :class:`~flcore.data.partitioners.base.Partitioner`,
:class:`~flcore.models.ModelSpec` or :class:`~flcore.sampling.base.Sampler` in it is checked and registered. A run's
identity has its content, not its place: a configuration names file and SHA-256, so that a worker on the same or another
machine loads the very same code or none.

What a file imports from `flcore` or from another named file (``from protofl_plugins.other import ...``) is followed,
and what a module imports from its own top-level package. Other modules are not part of a run's identity.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from flcore.config.imports import imported_names
from flcore.config.plugin_kinds import KINDS, PLACES, in_words, problem_of
from flcore.config.plugin_loader import PACKAGE, Finder
from flcore.config.plugin_loader import Plugin as Plugin
from flcore.config.plugin_places import resolve_paths as resolve_paths
from flcore.core.errors import ConfigError, Cure
from flcore.core.loaded_code import EditedError
from flcore.core.registry import Registry
from flcore.core.text import shorten
from flcore.io.files import given_path, replace_file

FOLDER = "plugins"
"""Of a run, where the files it was made with are kept."""

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_lock = threading.RLock()
_registered: dict[str, list[tuple[Registry[Any], str]]] = {}
"""Module -> what it has registered."""


def load(path: str | os.PathLike[str], sha256: str | None = None) -> Plugin:
    """Load a file and register what it defines; again, where its content has changed since.

    Args:
        path: the file.
        sha256: of the content it must have; None for any.

    Raises:
        ConfigError: the file is missing or another one, does not run, or has nothing that can be used.
        EditedError: this process has loaded the file as it should be, and it was edited since.
    """
    plugin = _read(path, sha256)
    _load([plugin])
    return plugin


def load_all(entries: Any) -> tuple[Plugin, ...]:
    """Load the plug-ins of a configuration: files, or mappings as :meth:`Plugin.to_mapping` gives them.

    Raises:
        ConfigError: as :func:`load` says; or an entry is neither, or two files have one name.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"plugins = {shorten(entries)}: expected a list of files")
    found: dict[str, Plugin] = {}
    for entry in entries:
        plugin = _read(*_entry(entry))
        other = found.setdefault(plugin.name, plugin)
        if (other.module, other.sha256) != (plugin.module, plugin.sha256):
            raise ConfigError(f"plugins: {other.path} and {plugin.path} have one name; rename one of them")
    _load([*found.values()])
    return tuple(found.values())


def with_classes(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Plugin, ...]]:
    """Load what a configuration names as ``module:Class``, and say its registered name in that place.

    Returns:
        The configuration, and the modules: those that the class needs of its own top-level package.

    Raises:
        ConfigError: there is no such module or class, or it cannot be used.
    """
    result, plugins = dict(raw), list(load_all(raw.get("plugins")))
    for (section, key), registry in PLACES.items():
        values = raw.get(section)
        chosen = values.get(key) if isinstance(values, Mapping) else None
        if not isinstance(chosen, str) or not _CLASS.fullmatch(chosen):
            continue
        where, (module, _, name) = f"{section}.{key} = {chosen}", chosen.partition(":")
        modules = _modules(module, where)
        _load(modules)
        entry = getattr(sys.modules.get(module) or importlib.import_module(module), name, None)
        if entry not in registry.values():
            raise ConfigError(f"{where}: there is no {registry.kind} called {name} in {module}")
        plugins += [plugin for plugin in modules if plugin.module not in {known.module for known in plugins}]
        result[section] = {**raw[section], key: getattr(entry, "name", name)}
    return result, tuple(plugins)


def _modules(module: str, where: str) -> list[Plugin]:
    """Return a module and what it imports of its own top-level package; nothing of `flcore`, whose code is known."""
    top = module.partition(".")[0]
    found: dict[str, Plugin] = {}
    waiting = [] if top == "flcore" else [module]
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] != top or (path := _file_of(name)) is None:
            continue
        found[name] = Plugin.of(name, path, path.read_bytes())
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        try:
            imported = imported_names(found[name].source, package=package)
        except SyntaxError as error:
            raise ConfigError(f"{where}: {path}:{error.lineno}: {error.msg}") from error
        for other in (name, *imported):
            parts = other.split(".")
            waiting += [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    if top != "flcore" and module not in found:
        raise ConfigError(f"{where}: there is no Python module {module}; install it, or set PYTHONPATH to its folder")
    return sorted(found.values(), key=lambda plugin: plugin.module)


def _file_of(module: str) -> Path | None:
    if module in Finder.sources and Finder.sources[module].path.is_file():
        return Finder.sources[module].path
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


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
    """Return a configuration's mapping for another machine: its plug-ins are written below a folder of that machine.

    Args:
        raw: as :meth:`flcore.config.schema.Config.to_mapping` gives it.
        sources: of the plug-ins, by module.
        folder: where they go.
    """
    plugins = [Plugin.of(module, Path(), source) for module, source in sources.items()]
    entries = [plugin.to_mapping() for plugin in keep(plugins, folder)]
    return {**raw, "plugins": entries} if entries else dict(raw)


def used(plugins: Iterable[Plugin], entries: Iterable[object]) -> tuple[Plugin, ...]:
    """Return the plug-ins on which entries of registries depend: by their classes, and by what these import.

    Of an importable module all modules of its top-level package count that the configuration names.

    Raises:
        ConfigError: an entry is of a plug-in that is not among them.
    """
    by_module = {plugin.module: plugin for plugin in plugins}
    waiting = [cls.__module__ for entry in entries for cls in type(entry).__mro__]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        package, _, rest = name.partition(".")
        if package == PACKAGE:
            name = f"{package}.{rest.partition('.')[0]}"
        elif name in by_module or name in _registered:
            waiting += [module for module in by_module if module.partition(".")[0] == package and module not in found]
        else:
            continue
        if name in found:
            continue
        if name not in by_module:
            file = getattr(sys.modules.get(name), "__file__", name)
            raise ConfigError(f"plugins: {file} is needed and not named; {Cure.NAME_PLUGIN}")
        found.add(name)
        waiting += imported_names(by_module[name].source)
    return tuple(plugin for module, plugin in by_module.items() if module in found)


def unload(name: str) -> None:
    """Forget a plug-in and what it has registered."""
    with _lock:
        for module in (f"{PACKAGE}.{name}", name):
            if module in Finder.sources:
                _forget(module)
                del Finder.sources[module]
                sys.modules.pop(module, None)


def _forget(module: str) -> None:
    for registry, entry in _registered.pop(module, []):
        registry.remove(entry)


# ----------------------------------------------------------------------------------------------------------- loading


def _entry(entry: Any) -> tuple[str | os.PathLike[str], str | None, str | None]:
    """Return path, SHA-256 and module of an entry."""
    if isinstance(entry, str | os.PathLike):
        return entry, None, None
    if isinstance(entry, Mapping) and {"path", "sha256"} <= entry.keys() <= {"path", "sha256", "module"}:
        path, sha256, module = entry["path"], entry["sha256"], entry.get("module")
        if isinstance(path, str) and isinstance(sha256, str) and isinstance(module, str | None):
            return path, sha256, module
    raise ConfigError(f"plugins: {shorten(entry)}: expected the path of a Python file")


def _read(path: str | os.PathLike[str], sha256: str | None, module: str | None = None) -> Plugin:
    try:
        place = given_path(path).absolute()
        if place.exists() and not place.is_file():
            raise ConfigError(f"plug-in {shorten(str(place))}: is no file")  # nor a device, which may never end
        source = place.read_bytes()
    except OSError as error:
        raise ConfigError(f"plug-in {shorten(str(path))}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no file can be called so
        raise ConfigError(f"plug-in {shorten(str(path))}: cannot be read ({error})") from error
    plugin = Plugin.of(module or f"{PACKAGE}.{place.stem}", place, source)
    if sha256 not in (None, plugin.sha256):
        if getattr(sys.modules.get(plugin.module), "__plugin__", None) == sha256:
            raise EditedError.of(place)
        raise ConfigError(
            f"plug-in {place}: is not the file that this configuration names (its SHA-256 is {plugin.sha256[:8]}..., "
            f"not {str(sha256)[:8]}...); put that one back, or begin another run with this one"
        )
    return plugin


def _load(plugins: Sequence[Plugin]) -> None:
    """Import plug-ins and register what they define, all or nothing; where one has changed, all of them again."""
    with _lock:
        if all(getattr(sys.modules.get(p.module), "__plugin__", None) == p.sha256 for p in plugins):
            return
        sources, modules = dict(Finder.sources), {p.module: sys.modules.pop(p.module, None) for p in plugins}
        Finder.sources.update({plugin.module: plugin for plugin in plugins})
        before = {module: list(_registered.get(module, ())) for module in modules}
        entries = [(registry, name, registry[name]) for kept in before.values() for registry, name in kept]
        try:
            for plugin in plugins:
                _forget(plugin.module)
            for plugin in plugins:
                _register(plugin, _imported(plugin))
        except BaseException:
            for module, old in modules.items():
                _forget(module)
                sys.modules.pop(module, None)
                if old is not None:
                    sys.modules[module] = old
            for registry, name, entry in entries:
                registry.add(name, entry)
            _registered.update({module: kept for module, kept in before.items() if kept})
            Finder.sources.clear()
            Finder.sources.update(sources)
            raise


def _imported(plugin: Plugin) -> ModuleType:
    try:
        return importlib.import_module(plugin.module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.lineno else str(plugin.path)
        raise ConfigError(f"plug-in {place}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(plugin.path)
        ]
        place = f"{plugin.path}:{lines[-1]}" if lines else str(plugin.path)
        raise ConfigError(f"plug-in {place}: {in_words(error)}") from error


def _register(plugin: Plugin, module: ModuleType) -> None:
    """Register the classes that a module defines.

    Raises:
        ConfigError: a file has none, or one cannot be used.
    """
    found: list[tuple[Registry[Any], Any]] = [
        (registry, value)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == plugin.module and not name.startswith("_")
        for registry, base in KINDS
        if base in value.__mro__
    ]
    if not found and plugin.module.startswith(f"{PACKAGE}."):
        kinds, bases = (registry.kind for registry, _ in KINDS), (base.__name__ for _, base in KINDS)
        raise ConfigError(
            f"plug-in {plugin.path}: defines no {', '.join(kinds)}, that is no public subclass of {', '.join(bases)}"
        )
    for registry, cls in found:
        problem = problem_of(registry, cls)
        if problem is not None:
            raise ConfigError(f"plug-in {plugin.path}: {cls.__name__} {problem}")
        registry.add(cls.name, cls)
        _registered.setdefault(plugin.module, []).append((registry, cls.name))
