"""Names of a package found in its sources, across re-exports and lazy tables; nothing is imported."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """Where something is defined: a module, a class, a function or an assignment."""

    module: str
    node: ast.AST


class Source:
    """The packages below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found = cache(self._find)

    def find(self, module: str, name: str) -> Place | None:
        """Return what `module` calls `name`, or None where its sources do not tell."""
        return self._found(module, name)

    def text(self, module: str) -> str:
        """Return a module's source, empty if there is none."""
        path = self._root.joinpath(*module.split("."))
        found = [one for one in (path / "__init__.py", path.with_suffix(".py")) if one.is_file()]
        return found[0].read_text() if found else ""

    def members(self, place: Place | None) -> dict[str, Place]:
        """Return the members of a module, of a class and its bases, or of an object that a module makes."""
        if place is None:
            return {}
        if isinstance(place.node, ast.Module):
            return {name: Place(place.module, node) for name, node in _defined(place.node.body)}
        if not isinstance(place.node, ast.ClassDef):
            made = _made_by(place.node)
            return self.members(self.find(place.module, made)) if made else {}
        members: dict[str, Place] = {}
        for base in reversed([ast.unparse(one).split("[")[0] for one in place.node.bases]):
            members |= self.members(self.find(place.module, base))
        for function in ast.walk(place.node):
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self":
                members.setdefault(function.attr, Place(place.module, function))
        return members | {name: Place(place.module, node) for name, node in _defined(place.node.body)}

    def _find(self, module: str, name: str) -> Place | None:
        if self.text(f"{module}.{name}"):
            return Place(f"{module}.{name}", self._tree(f"{module}.{name}"))
        if "." in name:
            return self.members(self.find(module, name.split(".")[0])).get(name.split(".")[1])
        for known, node in reversed(list(_defined(self._tree(module).body))):
            if known == name:
                return self._followed(module, name, node)
        return self._lazily(module, name)

    def _followed(self, module: str, name: str, node: ast.AST) -> Place | None:
        if not isinstance(node, ast.ImportFrom):
            return Place(module, node)
        package = module if (self._root.joinpath(*module.split(".")) / "__init__.py").is_file() else ""
        above = resolve_name("." * node.level + (node.module or ""), package or module.rpartition(".")[0])
        real = next(one.name for one in node.names if (one.asname or one.name) == name)
        return self.find(above, real) if above.split(".")[0] == module.split(".")[0] else None

    def _lazily(self, module: str, name: str) -> Place | None:
        """Look a name up in a package's table of lazy imports, or in what the modules below it export."""
        text = self.text(module)
        table = re.search(rf'"{name}": "\.([\w.]+):{name}"', text)
        if table is not None:
            return self.find(f"{module}.{table[1]}", name)
        if "__getattr__" not in text and "_LazyModule" not in text:
            return None
        for path in sorted(self._root.joinpath(*module.split(".")).rglob("*.py")):
            if path.name != "__init__.py" and re.search(
                rf"^(class {name}\b|{name}\b.*= )", path.read_text(), re.M
            ):
                return self.find(".".join(path.relative_to(self._root).with_suffix("").parts), name)
        return None

    def _tree(self, module: str) -> ast.Module:
        return _parsed(self.text(module))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that statements bind, also those inside of `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((one.id, node) for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, node) for one in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from _defined(inner)
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)


def _made_by(node: ast.AST) -> str | None:
    """Return the class that an assignment calls, or that its annotation names."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func)
    return None
