"""Hooks of mkdocs.yml: pages and plots that lie outside docs/ become part of the site, and links lead to them.

Documents link to each other as on the repository's host, by paths. The site has README.md as its start page, the other
documents of the root beside the guides, and plots in plots/.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
PLOTS = "tools/results"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def site_path(path: str) -> str:
    """The place of a file of the repository in the site."""
    if path in PAGES:
        return PAGES[path]
    if posixpath.dirname(path) == PLOTS:
        return f"plots/{posixpath.basename(path)}"
    return posixpath.relpath(path, "docs")


def relinked(text: str, document: str) -> str:
    """The text of a document of the repository, with its links as the site needs them."""
    start = posixpath.dirname(site_path(document))

    def link(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        return f"{opening}{posixpath.relpath(site_path(path), start or '.')}{anchor or ''}{closing}"

    return LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents of the root and the plots."""
    from mkdocs.structure.files import File  # here, so that tests import this module without mkdocs

    for document, place in PAGES.items():
        files.append(File.generated(config, place, content=relinked((ROOT / document).read_text(), document)))
    for plot in sorted((ROOT / PLOTS).glob("*.svg")):
        files.append(File.generated(config, site_path(f"{PLOTS}/{plot.name}"), abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of the pages of docs/; those of generated pages are right already."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}")
