"""Articles from a MediaWiki XML dump, as plain paragraphs."""

from __future__ import annotations

import bz2
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Larger pages are lists and tables made by programs; parsing one can take minutes.
MAX_PAGE_CHARACTERS = 2_000_000
_FILE_NAMESPACE, _CATEGORY_NAMESPACE = "6", "14"
_SKIPPED_TAGS = frozenset(
    [
        "ref",
        "references",
        "gallery",
        "table",
        "td",
        "th",
        "tr",
        "caption",
        "timeline",
        "math",
        "chem",
        "score",
        "imagemap",
        "source",
        "syntaxhighlight",
        "graph",
        "pre",
        "maplink",
        "mapframe",
        "hiero",
        "templatedata",
        "section",
        "indicator",
        "inputbox",
        "categorytree",
        "style",
    ]
)
_SKIPPED_SECTIONS = frozenset(
    """see also;references;external links;further reading;notes;bibliography;sources;citations;footnotes;works cited
notes and references;references and notes;general references;explanatory notes""".replace("\n", ";").split(";")
)
_BEHAVIOUR_SWITCH = re.compile(r"__[A-Z]+__")
# What templates that were taken out leave behind: "(; , Aristotélēs)", "Greek:, Apollōn", "(ANSI,)".
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:]\s*)*\)|\[\s*\]")
_OPENING_PUNCTUATION = re.compile(r"\(\s*(?:[,;:]\s+)*(?:[,;:](?!\w)\s*)?")
_CLOSING_PUNCTUATION = re.compile(r"[,;:\s]+\)")
_PUNCTUATION_TWICE = re.compile(r"[,;:]\s*(?=[,;](?:\s|$))")
_LEADING_PUNCTUATION = re.compile(r"^\s*[,;:]+\s+")
_SPACE_BEFORE_PUNCTUATION = re.compile(r"\s+([,.;:)])(?=[\s,.;:)]|$)")
_MEASURES = ("convert", "cvt")
_NUMBER_OR_JOINER = re.compile(r"[\d.,+−/-]+|to|and|or|by|x|×|–|-|±")
# Name of a template -> which of its parameters is the text.
_WRAPPERS = {"lang": 1, "nowrap": 0, "nobr": 0, "em": 0, "strong": 0, "abbr": 0, "small": 0}
_CHARACTERS = {"nbsp": " ", "ndash": "–", "mdash": "—", "snd": " – ", "spnd": " – ", "spaced ndash": " – ", "'": "'"}
_SPACES = re.compile(r"\s+")
# A paragraph ends at an empty line; a single line break inside it is white space.
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
# Lines that still carry table or template syntax are what a broken page left over.
_MARKUP_LEFT = re.compile(r"\{\{|\}\}|\{\||\|\}|^\s*[|!]|\[\[|\]\]|</?[a-zA-Z][^>]*>")
_INTERLANGUAGE = re.compile(r"^[a-z]{2,3}(-[a-z]+)*$|^simple$")


@dataclass(frozen=True)
class Page:
    """A page of a dump, its markup untouched.

    Attributes:
        title: name of the article.
        text: wikitext.
        skipped_links: lower-case names of the namespaces whose links are not text: files and categories.
    """

    title: str
    text: str
    skipped_links: frozenset[str]


def _open_dump(path: Path) -> IO[bytes]:
    return bz2.open(path, "rb") if path.suffix == ".bz2" else path.open("rb")


def _local(tag: str) -> str:
    """An element's name without the XML namespace."""
    return tag.rsplit("}", 1)[-1]


def read_dump(path: Path, skipped: dict[str, int]) -> Iterator[Page]:
    """Yield the articles of a dump; memory does not grow with it.

    Args:
        path: XML, plain or .bz2.
        skipped: counts what is left out: redirect, other_namespace, too_large, empty.

    Raises:
        ValueError: not a MediaWiki dump, or cut short.
    """
    links = {"file", "image", "category"}
    root: Any = None
    try:
        with _open_dump(path) as file:
            for event, element in ElementTree.iterparse(file, events=("start", "end")):
                if root is None:
                    root = element
                    if _local(root.tag) != "mediawiki":
                        raise ValueError(f"{path} is not a MediaWiki dump: its first element is <{_local(root.tag)}>")
                if event == "start":
                    continue
                name = _local(element.tag)
                if name == "namespace" and element.get("key") in (_FILE_NAMESPACE, _CATEGORY_NAMESPACE) and element.text:
                    links.add(element.text.lower())
                elif name == "page":
                    page = _article(element, frozenset(links), skipped)
                    root.clear()
                    if page is not None:
                        yield page
    except (ElementTree.ParseError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole MediaWiki dump ({error}): download it again") from error


def _article(element: Any, links: frozenset[str], skipped: dict[str, int]) -> Page | None:
    fields = {_local(child.tag): child for child in element.iter()}
    text = (fields["text"].text or "") if "text" in fields else ""
    namespace = fields["ns"].text if "ns" in fields else "0"
    reason = None
    if namespace != "0":
        reason = "other_namespace"
    elif "redirect" in fields or text[:30].lstrip().lower().startswith("#redirect"):
        reason = "redirect"
    elif not text.strip():
        reason = "empty"
    elif len(text) > MAX_PAGE_CHARACTERS:
        reason = "too_large"
    if reason is not None:
        skipped[reason] = skipped.get(reason, 0) + 1
        return None
    return Page(fields["title"].text or "" if "title" in fields else "", text, links)


def _is_text_link(title: str, skipped_links: frozenset[str]) -> bool:
    prefix, colon, _ = title.strip().partition(":")
    if not colon:
        return True
    return prefix.strip().lower() not in skipped_links and not _INTERLANGUAGE.match(prefix.strip())


def _render(code: Any, page: Page) -> Iterator[str]:
    """Yield the text of parsed wikitext; headings come as a line of their own, marked by a leading NUL and their level."""
    from mwparserfromhell import nodes

    for node in code.nodes:
        if isinstance(node, nodes.Text):
            yield _LINE_BREAK.sub(" ", str(node.value))
        elif isinstance(node, nodes.Wikilink):
            if _is_text_link(str(node.title), page.skipped_links):
                yield from _render(node.text if node.text is not None else node.title, page)
        elif isinstance(node, nodes.ExternalLink):
            if node.title is not None:
                yield from _render(node.title, page)
        elif isinstance(node, nodes.HTMLEntity):
            # "&#xD800;" is half a character, which no encoding accepts.
            character = node.normalize() or ""
            yield "" if "\ud800" <= character <= "\udfff" else character
        elif isinstance(node, nodes.Heading):
            yield f"\n\0{node.level}{node.title.strip_code()}\n"
        elif isinstance(node, nodes.Tag):
            yield from _render_tag(node, page)
        elif isinstance(node, nodes.Template):
            yield from _render_template(node, page)


def _render_template(node: Any, page: Page) -> Iterator[str]:
    """The few templates that stand inside sentences for plain words; all others are no text."""
    name = str(node.name).strip().lower()
    words = ["".join(_render(parameter.value, page)).strip() for parameter in node.params if not parameter.showkey]
    if name in _MEASURES:
        # 3|to|5|km|mi: up to the first word that is neither a number nor a joiner, the unit.
        unit = next((i for i, word in enumerate(words) if not _NUMBER_OR_JOINER.fullmatch(word)), len(words))
        yield " ".join(words[: unit + 1])
    elif name in _WRAPPERS and len(words) > _WRAPPERS[name]:
        yield words[_WRAPPERS[name]]
    else:
        yield _CHARACTERS.get(name, "")


def _render_tag(node: Any, page: Page) -> Iterator[str]:
    name = str(node.tag).strip().lower()
    if name in _SKIPPED_TAGS:
        return
    if name in ("br", "hr", "li", "dt", "dd", "p", "div", "blockquote", "center"):
        yield "\n" if name != "br" else " "
    if node.contents is not None:
        yield from _render(node.contents, page)
    if name in ("p", "div", "blockquote", "center"):
        yield "\n"


def _clean_line(line: str) -> str:
    line = _EMPTY_BRACKETS.sub("", _BEHAVIOUR_SWITCH.sub("", line.replace("'''", "").replace("''", "")))
    line = _CLOSING_PUNCTUATION.sub(")", _OPENING_PUNCTUATION.sub("(", _SPACES.sub(" ", line)))
    line = _LEADING_PUNCTUATION.sub("", _PUNCTUATION_TWICE.sub("", line))
    return _SPACES.sub(" ", _SPACE_BEFORE_PUNCTUATION.sub(r"\1", line)).strip()


def paragraphs(page: Page) -> list[str]:
    """Return an article's text, one paragraph or list item a string: no templates, tables, references, files, categories,
    headings, or sections that list sources."""
    import mwparserfromhell

    text = "".join(_render(mwparserfromhell.parse(page.text, skip_style_tags=False), page))
    result, skipped_level = [], 0
    for line in text.split("\n"):
        if line.startswith("\0"):
            level, title = int(line[1]), line[2:].strip().lower()
            if skipped_level == 0 or level <= skipped_level:
                skipped_level = level if title in _SKIPPED_SECTIONS else 0
            continue
        line = _clean_line(line)
        # A line without any letter is left-over punctuation.
        if skipped_level or _MARKUP_LEFT.search(line) or not any(c.isalpha() for c in line):
            continue
        result.append(line)
    return result
