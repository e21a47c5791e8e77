"""Where the product can be made wrong: each `raise` taken out, each guard's condition inverted.

A guard is an `if` whose body ends by leaving. A site is named `path:function:kind:n`, the n-th of its kind
in its function, so that a name outlives changes elsewhere in the file.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PARTS = {
    "dataset": "schemas/dataset",
    "connector": "connector",
    "proof": "service/proof",
    "store": "service/store",
    "work": "service/work",
    "artifacts": "service/artifacts",
    "publish": "service/publish",
    "plan": "service/plan",
    "control": "service/control",
    "api": "service/api",
}
LEAVES = (ast.Raise, ast.Return, ast.Continue, ast.Break)
ASK = "_mutated"
IMPORT = f"from tests.mutants.switch import mutated as {ASK}"


class Instrument(ast.NodeTransformer):
    """Make each site of a module ask whether it is the mutant; `sites` names them in the source's order."""

    def __init__(self, path: str) -> None:
        self.sites: list[str] = []
        self._path = path
        self._scope: list[str] = []
        self._made: Counter[tuple[str, str]] = Counter()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._within(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._within(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._within(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        asks = ast.UnaryOp(ast.Not(), self._ask("raise"))
        return ast.If(asks, [node], [])

    def visit_If(self, node: ast.If) -> ast.AST:
        asks = self._ask("guard") if isinstance(node.body[-1], LEAVES) else None
        self.generic_visit(node)
        if asks is not None:
            holds = ast.Call(ast.Name("bool", ast.Load()), [node.test], [])
            node.test = ast.Compare(asks, [ast.NotEq()], [holds])
        return node

    def _within(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def _ask(self, kind: str) -> ast.Call:
        scope = ".".join(self._scope) or "<module>"
        self._made[scope, kind] += 1
        self.sites.append(f"{self._path}:{scope}:{kind}:{self._made[scope, kind]}")
        return ast.Call(ast.Name(ASK, ast.Load()), [ast.Constant(self.sites[-1])], [])


def instrumented(path: str, source: str) -> tuple[str, list[str]]:
    """Return a module's source that asks at each site, and the sites; a source without any as it is."""
    tree = ast.parse(source)
    instrument = Instrument(path)
    instrument.visit(tree)
    if not instrument.sites:
        return source, []
    opening = 1 if ast.get_docstring(tree, clean=False) is not None else 0
    while isinstance(tree.body[opening], ast.ImportFrom) and tree.body[opening].module == "__future__":
        opening += 1
    tree.body[opening:opening] = ast.parse(IMPORT).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", instrument.sites


def part_of(path: str) -> str | None:
    """Return the part that a file of the product belongs to; None where it is not made wrong."""
    return next((part for part, folder in PARTS.items() if path.startswith(f"{folder}/")), None)


def sites_of(root: Path, parts: list[str]) -> Iterator[str]:
    """Yield every site of some parts below `root`."""
    for part in parts:
        for path in sorted((root / PARTS[part]).rglob("*.py")):
            yield from instrumented(path.relative_to(root).as_posix(), path.read_text())[1]
