"""A hook of mkdocs: pages that lie outside docs/, and links as they are in the repository.

Pages are written to be read in the repository, where a link may lead to any file. Here one that
leads to a page stays a link, and one to a source file becomes its path. A link to nothing is an
error of the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    **{
        name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    },
    "examples/README.md": "examples/README.md",
}
"""Pages that lie elsewhere, by their paths in the repository: where they are here."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
log = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for source, here in OUTSIDE.items():
        files.append(File.generated(config, here, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead its links to where their files are here."""
    here = page.file.src_uri
    source = {to: path for path, to in OUTSIDE.items()}.get(here, f"docs/{here}")

    def led(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / wanted).exists():
            log.warning("%s links to %s, which is nowhere", source, target)
            return match[0]
        found = OUTSIDE.get(wanted, wanted.removeprefix("docs/"))
        if files.get_file_from_path(found) is None or found == wanted and wanted not in OUTSIDE:
            return text if text.startswith("`") else f"{text} (`{wanted}`)"
        relative = posixpath.relpath(found, posixpath.dirname(here) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return "".join(
        part if part.startswith("```") else LINK.sub(led, part)
        for part in re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    )
