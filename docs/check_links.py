"""Follows every link of the built site that leads to the site itself: `make docs` runs it.

A link to a page, a file or a place in a page that is not there ends it with 1. Links to other sites
are counted; they cannot be followed without a network, with one `make links` does it.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and the places in it that a link can lead to."""

    def __init__(self, path: Path) -> None:
        """Read the page."""
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, and how it is called."""
        found = dict(attrs)
        self.links += [found[key] or "" for key in ("href", "src") if key in found]
        self.places |= {found[key] or "" for key in ("id", "name") if key in found}


def broken(site: Path) -> tuple[list[str], int, int]:
    """The broken links of a site, the number of links within it, and of those that leave it.

    Args:
        site: the folder.
    """
    pages = {path: Page(path) for path in map(Path.resolve, site.rglob("*.html"))}
    wrong: list[str] = []
    inside = outside = 0
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += not link.startswith("data:")
                continue
            inside += 1
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            place = unquote(parts.fragment)
            known = pages[target].places if target in pages else set()
            if not target.exists() or (place and target in pages and place not in known):
                wrong.append(f"{page.path.relative_to(site.resolve())}: {link}")
    return sorted(set(wrong)), inside, outside


def main(site: Path) -> None:
    """Check a site and say what was found."""
    wrong, inside, outside = broken(site)
    print(f"{inside:,} links within the site followed, {len(wrong)} broken; {outside:,} lead out")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
