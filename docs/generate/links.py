"""Checks the built site: every link within it leads to a page, and to a place on it. python -m docs.generate.links"""

import html.parser
import pathlib
import sys
import urllib.parse

SITE = pathlib.Path(__file__).parents[1] / "_build" / "html"


class Page(html.parser.HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key in ("href", "src"):
                self.links.append(value)
            if value and key in ("id", "name"):
                self.anchors.add(value)


def broken(site: pathlib.Path) -> list[str]:
    """Links of a site that lead nowhere, each with its page."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("#!"):
                continue
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            anchor = urllib.parse.unquote(parts.fragment)
            lacks = there in pages and anchor and anchor not in pages[there].anchors
            if not there.exists() or lacks:
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


if __name__ == "__main__":
    found = broken(SITE)
    print("\n".join(found) or f"all links within {SITE} lead somewhere")
    sys.exit(bool(found))
