"""The Markdown pages of the project, and what stands in them: links, headings, code spans and code blocks."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.paths import ROOT

DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """A code block: its language (empty for an indented one), text and title (a file, or "prints")."""

    language: str
    text: str
    title: str = ""

    @property
    def included(self) -> str:
        """The text with the files that it includes, as mkdocs puts them in."""

        def text(match: re.Match[str]) -> str:
            source = read_source(match[1])
            if match[2] is None:
                return source
            start, end = f"[start:{match[2]}]", f"[end:{match[2]}]"
            assert start in source, f"{match[1]} has no section {match[2]}"
            lines = source.partition(start)[2].partition(end)[0].splitlines()[1:-1]
            margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            return "\n".join(line[margin:] for line in lines)

        return _INCLUDE.sub(text, self.text)


@dataclass(frozen=True)
class Page:
    """A Markdown page: its path from the project's root, and its text."""

    path: str
    text: str

    @property
    def prose(self) -> str:
        """The text without code blocks."""
        return _INDENTED.sub("", _FENCED.sub("", self.text))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All code blocks, the fenced ones first."""
        fenced = [
            Block(match["language"], match["text"], match["title"] or "") for match in _FENCED.finditer(self.text)
        ]
        outside = _FENCED.sub("", self.text)
        return (*fenced, *(Block("", match[0]) for match in _INDENTED.finditer(outside)))

    @property
    def files(self) -> dict[str, str]:
        """The YAML files that the page shows with their names."""
        return {block.title: block.included for block in self.blocks if block.language == "yaml" and block.title}

    @property
    def spans(self) -> tuple[str, ...]:
        """The inline code of the prose, line breaks made spaces."""
        return tuple(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose))

    @property
    def links(self) -> tuple[str, ...]:
        """The targets of links and pictures."""
        return tuple(re.findall(r"\]\(([^)\s]+)\)", self.prose))

    @property
    def anchors(self) -> frozenset[str]:
        """The anchors of the headings, as mkdocs makes them."""
        return frozenset(slug(heading) for heading in re.findall(r"^#+ +(.+)$", self.prose, re.MULTILINE))


_INCLUDE = re.compile(r"^--8<--\n([^:\n]+)(?::(\w+))?\n--8<--$", re.MULTILINE)
_FENCED = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"\n]*)")?[^\n]*\n(?P<text>.*?)^```', re.MULTILINE | re.DOTALL
)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}\S[^\n]*\n(?:\n(?= {4}))*)(?: {4}[^\n]*\n(?:\n(?= {4}))*)*")


def slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, without punctuation, hyphens between the words."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]|<[^>]+>", "", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


@cache
def site_hooks() -> ModuleType:
    """Return the module ``docs/site_hooks.py``, which makes the generated pages."""
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def generated(path: str) -> Page:
    """Return a page of the site that is made from the code, by its path from the project's root.

    It is made at the first use: that takes seconds for some, which the collection of the tests must not take.
    """
    return Page(path, site_hooks().generated_pages()[path.removeprefix("docs/")]())


@cache
def written() -> dict[str, Page]:
    """Return the pages that people wrote, by their paths from the project's root."""
    files = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
    return {path: Page(path, (ROOT / path).read_text("utf-8")) for path in (str(f.relative_to(ROOT)) for f in files)}


def all_paths() -> list[str]:
    """Return the paths from the project's root of all pages, written and generated."""
    return [*written(), *(f"docs/{path}" for path in site_hooks().generated_pages())]


def read_page(path: str) -> Page:
    """Return the page of a path from the project's root."""
    return written().get(path) or generated(path)


def resolve(page: Page, target: str) -> str:
    """Return the path from the project's root of a relative link's file, without the anchor."""
    path = target.partition("#")[0]
    if not path:
        return page.path
    return str((ROOT / page.path).parent.joinpath(path).resolve().relative_to(ROOT))


def read_source(path: str) -> str:
    """Return the text of a file of the project."""
    return Path(ROOT / path).read_text("utf-8")
