"""Stands in for packages that were not carried: every name of theirs can be imported, and nothing works.

Carried as `carried_stub` beside the packages; no other module of this repository is there.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Names(type):
    """Makes every attribute of a name another name: constants of classes are read at import."""

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401 - stands for whatever is there
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")


def _name(name: str) -> type:
    """Return a class for annotations, unions and bases, and whose constants and instances are mere names."""

    def accept(self: object, *_: object, **__: object) -> None:
        """Take whatever the package would take: some instances are made at import."""

    def any_schema(cls: type, source: object, handler: object) -> object:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    body = {
        "__init__": accept,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(any_schema),
    }
    return _Names(name.rpartition(".")[2], (), body)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as above
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below one package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has every name already."""


def stand_in(package: str) -> None:
    """Make `package`, which is being imported, and all modules below it have every name."""
    sys.modules[package].__class__ = _Module
    sys.meta_path.insert(0, _Finder(package))
