"""Bounds on what one step of a chat template may make, so that nothing in a template runs without end.

A template comes from whoever posts the job, or from a model's repository. jinja's sandbox keeps it from the
process's objects, but not from `9**9**9` or `'a' * 10**10`. Such a step is one call into C: it holds the
interpreter's lock, so no timeout, no other thread and no lease can stop it. jinja also computes what is
constant while it compiles. Therefore every step that can make something large says how large before it is
done, and no operator, filter or call is done while compiling.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, cast

from service.errors import TemplateRefused
from service.plan.template_costs import FILTER_COSTS, METHOD_COSTS, check, operator_cost, weight

JOINED = "quarry_joined"
MEASURED = "quarry_measured"
"""Names of the filters that `bound_tree` puts around what jinja has no hook for."""

MAX_ADDED = 2**26
"""Most characters and items that additions of lists may append in one rendering, all together."""

_OPERATORS = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_SCOPES = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that jinja adds to a call inside a loop or block, and takes away before it is made."""


class Bounds:
    """Bounds every operator, filter, call and buffer of one sandboxed environment of jinja's.

    A step that would make more than `MAX_RENDER_CHARS` raises OverflowError, as jinja's `range` does.
    """

    def __init__(self, environment: Any) -> None:  # noqa: ANN401 - jinja2 is loaded late
        self._added = 0
        self._environment = environment
        self._call = environment.call
        # An operator that is intercepted is not computed while compiling either.
        environment.intercepted_binops = _OPERATORS
        environment.call_binop = self._binop
        environment.call = self._bounded_call
        environment.concat = _concat
        # What draws at random: the same plan has the same bytes, whenever it is made.
        environment.globals.pop("lipsum", None)
        environment.filters.pop("random", None)
        for name, function in list(environment.filters.items()):
            environment.filters[name] = _bounded_filter(name, function)
        environment.filters[JOINED] = _bounded_filter(JOINED, _joined)
        environment.filters[MEASURED] = _bounded_filter(MEASURED, lambda value: value)

    def start(self) -> None:
        """Forget what the rendering before this one added."""
        self._added = 0

    def _binop(self, _: object, operator: str, left: object, right: object) -> object:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            # What templates do at every turn.
            check(len(left) + len(right))
            return left + right
        check(operator_cost(operator, left, right))
        if operator == "+" and isinstance(right, list | tuple):
            # A list that grows in a loop is not measured as a whole at every turn.
            self._added += weight(right)
            check(self._added, MAX_ADDED)
        return self._environment.binop_table[operator](left, right)

    def _bounded_call(self, context: object, called: Any, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        cost = METHOD_COSTS.get(getattr(called, "__name__", ""))
        if cost is not None:
            # jinja wraps `format` in a function of its own.
            owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
            if isinstance(owner, str | bytes | int):
                args = _listed(args)
                given = {name: value for name, value in kwargs.items() if name not in _SCOPES}
                check(cost(owner, *args, **given))
        return _measured(self._call(context, called, *args, **kwargs))


def bound_tree(tree: Any, field: str) -> None:  # noqa: ANN401 - a jinja2 node
    """Refuse `**` in a parsed template, and lead `~` and lists of variables through filters, in place.

    Raises TemplateRefused, which names `field`.
    """
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    power = tree.find(nodes.Pow)
    if power is not None:
        raise TemplateRefused(
            f"the chat template raises to a power, line {power.lineno}: it could compute without end",
            field=field,
            cure="write the number itself",
        )

    def through(name: str, node: nodes.Node) -> nodes.Node:
        return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None).set_lineno(node.lineno)

    class Bounder(NodeTransformer):
        def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: ANN401
            super().generic_visit(node, *args, **kwargs)
            if isinstance(node, nodes.Concat):
                return through(JOINED, nodes.List(node.nodes).set_lineno(node.lineno))
            if (
                isinstance(node, nodes.List | nodes.Dict | nodes.Tuple)
                and getattr(node, "ctx", "load") == "load"
                and node.find(nodes.Name) is not None
            ):
                return through(MEASURED, node)
            return node

    Bounder().visit(tree)
    tree.set_environment(tree.environment)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a bound. It takes the context, so jinja does not compute it while compiling."""
    from jinja2 import pass_context

    cost = FILTER_COSTS.get(name)
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function, updated=())
    def bounded(context: Any, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - jinja2's context
        if cost is not None:
            args = _listed(args)
            check(cost(*args, **kwargs))
        if passed is not None:
            first = {
                "context": context,
                "eval_context": context.eval_ctx,
                "environment": context.environment,
            }
            args = (first[passed], *args)
        return _measured(function(*args, **kwargs))

    return pass_context(bounded)


def _concat(pieces: Iterable[str]) -> str:
    known = list(pieces)
    check(sum(map(len, known)))
    return "".join(known)


def _joined(values: Iterable[object]) -> str:
    return _concat(str(value) for value in values)


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with iterators read, so that they can be measured and then used."""
    return tuple(list(arg) if hasattr(arg, "__next__") else arg for arg in args)


def _measured(value: object) -> object:
    """Return `value`. Raises OverflowError where there is too much in it."""
    if value is not None:
        weight(value)
    return value
