"""Rewrite `conversations.jsonl`: questions about the standard library, answered from its docstrings.

The text ships with Python (CPython's library, PSF licence). The file is tracked, so that every machine runs
the same demo whatever its patch version of Python; this script says how it was made.
"""

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")

SEED = 20
NUM_CONVERSATIONS = 200
ANSWER_CHARS = range(60, 700)
OUT_OF_PLACE = re.compile(r"://|/usr/|/home/|>>>")
"""Addresses, paths of a machine, and doctests, which make poor answers."""

SYSTEM = "You explain Python's standard library. Answer from its documentation, and keep to what was asked."

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """Something documented: `heapq.nlargest`, its arguments as written, and its docstring."""

    name: str
    arguments: str
    text: str


def documented() -> Iterator[Entry]:
    """Yield what is public and documented in the library's single-file modules, at a fit length."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(sys.stdlib_module_names):
        source = library / f"{module}.py"
        if source.exists() and not module.startswith("_"):
            for node in ast.parse(source.read_text(encoding="utf-8")).body:
                yield from _entries(node, module)


def _entries(node: ast.stmt, parent: str) -> Iterator[Entry]:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    name = f"{parent}.{node.name}"
    text = re.sub(r"\n{3,}", "\n\n", ast.get_docstring(node) or "")
    if len(text) in ANSWER_CHARS and text.isascii() and not OUT_OF_PLACE.search(text):
        yield Entry(name, ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else "", text)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from _entries(child, name)


def said(role: str, content: str) -> Message:
    """Return one turn."""
    return {"role": role, "content": content}


def asked(entry: Entry, rng: random.Random) -> list[Message]:
    """Return a question about `entry` and its answer."""
    question = rng.choice(
        ("What does `{}` do?", "Explain `{}`.", "How is `{}` used?", "What should I know about `{}`?")
    )
    return [said("user", question.format(entry.name)), said("assistant", entry.text)]


def looked_up(entry: Entry) -> list[Message]:
    """Return a question whose answer passes through a tool call."""
    call = {"name": "signature", "arguments": json.dumps({"name": entry.name})}
    return [
        said("user", f"Which arguments does `{entry.name}` take?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call-1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": f"{entry.name}({entry.arguments})"},
        said("assistant", f"`{entry.name}({entry.arguments})`\n\n{entry.text}"),
    ]


def conversations() -> Iterator[dict[str, Any]]:
    """Yield conversations of one to five questions, some with a system turn, some with a tool."""
    rng = random.Random(SEED)
    entries = list(documented())
    rng.shuffle(entries)
    functions = [entry for entry in entries if entry.arguments]
    for number in range(NUM_CONVERSATIONS):
        messages = [said("system", SYSTEM)] if number % 3 == 0 else []
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            messages += asked(entries.pop(), rng)
        if number % 10 == 5:
            messages += looked_up(functions.pop(0))
        yield {"id": f"stdlib-{number:04d}", "messages": messages}


def main() -> None:
    """Write the file."""
    lines = (json.dumps(conversation) + "\n" for conversation in conversations())
    CONVERSATIONS.write_text("".join(lines))


if __name__ == "__main__":
    main()
