"""Compares two versions of a package by what is used of it."""

import ast
from dataclasses import dataclass, field

from tests.compat.source import Function, Place, Source
from tests.compat.used import MENTIONED, WATCHED, Use, imported, tabled, uses


@dataclass
class Report:
    """What was found, a line each: gone or called otherwise, changed, and what no source tells."""

    moved: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    unclear: set[str] = field(default_factory=set)
    as_before: int = 0


def judge(package: str, modules: list[ast.Module], old: Source, new: Source) -> Report:
    """Compare what `modules` and the tables use of `package`."""
    report = Report()
    for use in (*uses(modules), *tabled()):
        if use.module.split(".")[0] == package:
            _judge_use(use, old, new, report)
    for tree in modules:
        _judge_overrides(package, tree, old, new, report)
    for module, word in MENTIONED.items():
        if module.split(".")[0] == package and word not in new.text(module):
            report.moved.add(f"{module} no longer speaks of {word}")
    for module, name in (place.split(":") for place in WATCHED):
        if module.split(".")[0] == package:
            before, after = (_code(source.find(module, name)) for source in (old, new))
            if before != after:
                report.changed.add(f"{module}:{name}")
    return report


def _judge_use(use: Use, old: Source, new: Source, report: Report) -> None:
    about = f"{use.module}:{use.name}"
    before, after = (source.find(use.module, use.name) for source in (old, new))
    if before is None:
        report.unclear.add(about)
        return
    if after is None:
        report.moved.add(f"{about} is gone")
        return
    if use.call is not None and _misfit(old, before, use.call) is None:
        misfit = _misfit(new, after, use.call)
        if misfit is not None:
            report.moved.add(f"{about}: {misfit}, called as {ast.unparse(use.call)}")
            return
    report.as_before += 1


def _judge_overrides(package: str, tree: ast.Module, old: Source, new: Source, report: Report) -> None:
    """Hold the methods of our classes against those that they override, which the package calls."""
    known = {name: place for name, place in imported(tree).items() if place[0].split(".")[0] == package}
    for ours in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {one.name: one for one in ours.body if isinstance(one, Function)}
        for base in (ast.unparse(one) for one in ours.bases if ast.unparse(one) in known):
            before, after = (source.members(source.find(*known[base])) for source in (old, new))
            for name in methods.keys() & before.keys():
                if name not in after:
                    report.moved.add(f"{base}.{name}, which {ours.name} overrides, is gone")
                    continue
                now, then, taken = (
                    _parameters(one) for one in (after[name].node, before[name].node, methods[name])
                )
                extra = sorted(set(now) - set(then) - set(taken))
                if extra and methods[name].args.kwarg is None:
                    report.moved.add(f"{base}.{name} is now called with {extra}")
            for name in after.keys() - before.keys():
                node = after[name].node
                if isinstance(node, Function) and not name.startswith("_"):
                    abstract = any("abstractmethod" in ast.unparse(one) for one in node.decorator_list)
                    lines = report.moved if abstract and name not in methods else report.changed
                    lines.add(f"{base}.{name} is new{', and abstract' if abstract else ''}")


def _parameters(node: ast.AST) -> list[str]:
    if not isinstance(node, Function):
        return []
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _misfit(source: Source, place: Place, call: ast.Call) -> str | None:
    """Return why a call does not bind, None where it does or where nothing tells."""
    members = source.members(place) if isinstance(place.node, ast.ClassDef) else {}
    node = members["__init__"].node if "__init__" in members else place.node
    keywords = {one.arg for one in call.keywords if one.arg is not None}
    if isinstance(node, ast.ClassDef):
        fields = {name for name, one in members.items() if isinstance(one.node, ast.AnnAssign)}
        return f"{sorted(keywords - fields)} are no fields" if fields and keywords - fields else None
    if not isinstance(node, Function):
        return None
    names, told = _parameters(node), node.args
    names = names[names[:1] in (["self"], ["cls"]) :]
    positional = names[: len(names) - len(told.kwonlyargs)]
    given = sum(not isinstance(one, ast.Starred) for one in call.args)
    if told.kwarg is None and keywords - set(names):
        return f"it does not take {sorted(keywords - set(names))}"
    if told.vararg is None and given > len(positional):
        return f"it takes {len(positional)} positional arguments, not {given}"
    if len(keywords) < len(call.keywords) or given < len(call.args):
        return None
    optional = {one.arg for one, value in zip(told.kwonlyargs, told.kw_defaults, strict=True) if value}
    optional |= set(positional[len(positional) - len(told.defaults) :])
    missing = set(names) - optional - keywords - set(positional[:given])
    return f"it also needs {sorted(missing)}" if missing else None


def _code(place: Place | None) -> str | None:
    """Return what a definition does: its code without docstrings."""
    if place is None:
        return None
    copy = ast.parse(ast.unparse(place.node))
    for node in ast.walk(copy):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(copy)
