"""Hooks of the documentation site: files outside docs/ that its pages link to become pages of the site.

In the repository a link such as ``../stretto/recipes/writing.toml`` leads to the file. A site has docs/ alone, so such a file is
shown on a page below ``project/``, and the links to it are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "project/"
IN_NAVIGATION = ("LOG.md", "CHANGELOG.md", "CONTRIBUTING.md")
LANGUAGES = {".toml": "toml", ".py": "python"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def path_of(page: str) -> str:
    """The path, from the root of the repository, of the file that the page ``page`` shows."""
    return page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"


def page_of(path: str) -> str:
    """The page, from the root of the site, of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE + path if path.endswith(".md") else f"{OUTSIDE}{path}.md"


def resolve(target: str, path: str) -> str:
    """The path, from the root of the repository, that a link to ``target`` in the file ``path`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to."""
    waiting = [(path_of(file.src_uri), file.content_string) for file in files.documentation_pages()]
    seen = {path for path, _ in waiting}
    waiting.append(("", "".join(f"[]({path})" for path in IN_NAVIGATION)))
    while waiting:
        path, text = waiting.pop()
        for target in sorted({resolve(link[1], path) for link in LINK.finditer(text)} - seen):
            if target.startswith("docs/") or not (ROOT / target).is_file():
                continue  # a link that leads nowhere is left to MkDocs, which refuses it
            seen.add(target)
            shown = (ROOT / target).read_text(encoding="utf-8")
            if target.endswith(".md"):
                waiting.append((target, shown))
            else:
                shown = f"# {target}\n\n````{LANGUAGES.get(Path(target).suffix, 'text')}\n{shown}````\n"
            level = InclusionLevel.INCLUDED if target in IN_NAVIGATION else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page_of(target), content=shown, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files outside docs/, and links in such files, as links to pages of the site."""
    here = page.file.src_uri

    def rewritten(link: re.Match[str]) -> str:
        target = resolve(link[1], path_of(here))
        if not (ROOT / target).is_file():
            return link[0]
        return posixpath.relpath(page_of(target), posixpath.dirname(here) or ".") + (link[2] or "")

    return LINK.sub(rewritten, markdown)
