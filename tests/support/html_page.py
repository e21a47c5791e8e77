"""Reads a page of HTML like a browser does, and says where its tags do not fit together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Self

VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}
)


@dataclass
class Node:
    """An element: its attributes, and its texts and elements in order."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    def nodes(self) -> Iterator["Node"]:
        """Yield every element below this one, in the order of the page."""
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.nodes()

    def all(self, tag: str, kind: str = "") -> list["Node"]:
        """Return the elements of a tag below this one; of one class, if it is given."""
        return [
            node
            for node in self.nodes()
            if node.tag == tag and (not kind or kind in (node.attributes.get("class") or "").split())
        ]

    def one(self, tag: str, kind: str = "") -> "Node":
        """Return the only such element."""
        (found,) = self.all(tag, kind)
        return found

    def text(self) -> str:
        """Return all text inside, white space folded."""
        whole = "".join(child if isinstance(child, str) else f" {child.text()} " for child in self.children)
        return " ".join(whole.split())

    def cells(self) -> list[list[str]]:
        """Return a table's rows of texts, the header first."""
        rows = self.all("tr")
        return [[node.text() for node in row.nodes() if node.tag in {"th", "td"}] for row in rows]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("document")
        self._open = [self.root]

    @classmethod
    def read(cls, text: str) -> Self:
        reader = cls()
        reader.feed(text)
        reader.close()
        assert [node.tag for node in reader._open] == ["document"]
        return reader

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> names an attribute twice"
        node = Node(tag, dict(attrs))
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read_page(text: str) -> Node:
    """Return the page's root. Raises AssertionError where a tag is closed by another or never."""
    return _Reader.read(text).root
