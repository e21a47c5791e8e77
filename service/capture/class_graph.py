"""What a class inherits from, read from the sources of modules: nothing is imported, no device is touched."""

import ast
from collections import defaultdict
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path


def inherits(module: str, name: str, wanted: str) -> bool | None:
    """Say whether class `name` of `module` has one called `wanted` among its bases, at any depth.

    Only the top-level package of `module` is searched. None where its sources do not tell: a base that is
    computed, or that is chosen while a module is imported.
    """
    return _inherits(module, name, wanted, frozenset())


def defines(module: str, name: str) -> bool:
    """Say whether `module` has a class called `name`, or imports it."""
    source = _read(module)
    return source is not None and (name in source.bases or name in source.imported)


def _inherits(module: str, name: str, wanted: str, on_the_way: frozenset[tuple[str, str]]) -> bool | None:
    top = module.split(".")[0]
    if (module, name) in on_the_way or (source := _read(module)) is None:
        return None
    on_the_way |= {(module, name)}

    def each(where: str, what: str) -> bool | None:
        if what == wanted:
            return True
        return _inherits(where, what, wanted, on_the_way) if where.split(".")[0] == top else False

    answers = [each(where, what) for where, what in source.imported[name]]
    for bases in source.bases[name]:
        said = [each(module, base) for base in bases]
        answers.append(True if True in said else None if None in said else False)
    # A name that stands for several things must mean the same by all of them.
    return answers[0] if answers and all(answer is answers[0] for answer in answers) else None


class _Source:
    """A module's names: the bases of its classes, and the (module, name) that others were imported as."""

    def __init__(self, tree: ast.Module, package: str) -> None:
        self.bases: defaultdict[str, list[list[str]]] = defaultdict(list)
        self.imported: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.bases[node.name].append([_root(base) for base in node.bases])
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.split(".")[0]].append((alias.name, ""))
            elif isinstance(node, ast.ImportFrom):
                where = resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    self.imported[alias.asname or alias.name].append((where, alias.name))


def _root(base: ast.expr) -> str:
    """Return `nn` of `nn.Module`, `Generic` of `Generic[T]`, and nothing for what only running it tells."""
    while isinstance(base, ast.Attribute | ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


@cache
def _read(module: str) -> _Source | None:
    """Read a module's source; none if there is none.

    The file is found by its name: to ask Python for a submodule would import the packages around it.
    """
    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*parts)
    for file, package in (
        (place / "__init__.py", module),
        (place.with_suffix(".py"), module.rpartition(".")[0]),
    ):
        if file.is_file():
            return _Source(ast.parse(file.read_bytes()), package)
    return None
