"""The page of a comparison, parsed."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page shows; every element must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.plots, self.lines, self.text = 0, list[str](), ""
        self.tags, self.labels = set[str](), list[str]()
        self.asked = set[str]()  # addresses that a browser would ask for
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.asked |= {value for name, value in attrs if name in {"src", "href"} and value is not None}
        self.plots += tag == "svg"
        if tag == "polyline":
            self.lines.append(dict(attrs)["class"] or "")
        if tag not in {"meta", "link"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "polyline":
            self.lines.append(dict(attrs)["class"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\N{NO-BREAK SPACE}", " ")
        if self._open[-1:] == ["text"]:
            self.labels.append(data.replace("\N{NO-BREAK SPACE}", " "))
