from __future__ import annotations

import bz2
from pathlib import Path

import pytest

from data_prep.sources import RawDocument, sentences_of
from data_prep.wikitext import MAX_PAGE_CHARACTERS, Page, paragraphs, read_dump

LINKS = frozenset({"file", "image", "category"})

ARTICLE = """{{Infobox settlement|name=Springfield|{{nested|a=1}} }}
[[File:View.jpg|thumb|left|A ''view'' of [[Springfield]] in {{year|1900}}.]]
'''Springfield''' ({{lang-fr|Champ}}) is a ''town'' in the [[United States|States]].<ref name="a">A ''source''.</ref> It has
{{convert|3|mi}} of roads &amp; a <b>river</b>.<ref>{{cite web|url=http://x.org}}</ref>

== History ==
It was founded in 1850 by [[John Doe]] [http://example.org in a report].<!-- hidden -->
* First item with a [[link]]
* Second item

{| class="wikitable"
|-
! Year !! People
|-
| 1900 || 12
|}

<gallery>
File:One.jpg|Caption one
</gallery>
:<math>x^2 + y_1</math>
<nowiki>[[not a link]]</nowiki> stays text.

=== See also ===
* [[Shelbyville]]

== Geography ==
Hills surround it.__NOTOC__

== References ==
{{reflist}}
A dangling reference line.

== External links ==
* [http://springfield.example Official site]

[[Category:Towns]]
[[fr:Springfield]]
"""


def page_xml(title: str, text: str, namespace: int = 0, redirect: bool = False) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    target = '<redirect title="X"/>' if redirect else ""
    return f"<page><title>{title}</title><ns>{namespace}</ns>{target}<revision><text>{text}</text></revision></page>"


def dump(*pages: str) -> bytes:
    names = '<namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>'
    site = f"<siteinfo><namespaces>{names}</namespaces></siteinfo>"
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{site}{"".join(pages)}</mediawiki>'
    return xml.encode("utf-8")


def test_an_article_becomes_clean_paragraphs() -> None:
    assert paragraphs(Page("Springfield", ARTICLE, LINKS)) == [
        "Springfield is a town in the States. It has 3 mi of roads & a river.",
        "It was founded in 1850 by John Doe in a report.",
        "First item with a link",
        "Second item",
        # The line with <nowiki> shows markup to its reader, and is left out as what a broken page would leave over.
        "Hills surround it.",
    ]


def test_no_markup_is_left() -> None:
    text = "\n".join(paragraphs(Page("Springfield", ARTICLE, LINKS)))
    for leftover in ("{{", "}}", "{|", "|}", "<ref", "</", "[[", "'''", "thumb", "Category:", "http", "x^2"):
        assert leftover not in text
    for dropped in ("Shelbyville", "Official site", "dangling", "hidden", "Caption", "Infobox", "12"):
        assert dropped not in text


def test_redirects_other_namespaces_and_empty_pages_are_counted(tmp_path: Path) -> None:
    pages = [
        page_xml("A", "Some text."),
        page_xml("B", "#REDIRECT [[A]]", redirect=True),
        page_xml("C", "#redirect [[A]]"),
        page_xml("Talk:A", "chatter", namespace=1),
        page_xml("Template:T", "{{x}}", namespace=10),
        page_xml("D", "   "),
        page_xml("E", "x" * (MAX_PAGE_CHARACTERS + 1)),
    ]
    path = tmp_path / "dump.xml"
    path.write_bytes(dump(*pages))
    skipped: dict[str, int] = {}
    assert [page.title for page in read_dump(path, skipped)] == ["A"]
    assert skipped == {"redirect": 2, "other_namespace": 2, "empty": 1, "too_large": 1}


def test_bz2_gives_the_same_and_the_dumps_own_names_of_files_count(tmp_path: Path) -> None:
    content = dump(page_xml("A", "Text [[Datei:x.jpg|thumb|caption]] and [[Kategorie:Y]] more."))
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(content))
    (page,) = read_dump(tmp_path / "dump.xml.bz2", {})
    assert paragraphs(page) == ["Text and more."]


@pytest.mark.parametrize("name", ["dump.xml", "dump.xml.bz2"])
def test_a_dump_that_is_cut_short_is_named(tmp_path: Path, name: str) -> None:
    content = dump(*(page_xml(f"A{i}", f"Text number {i}.") for i in range(500)))
    content = bz2.compress(content) if name.endswith("bz2") else content
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{name} is not a whole MediaWiki dump.*download it again"):
        list(read_dump(tmp_path / name, {}))


def test_another_xml_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.xml").write_text("<html><body/></html>")
    with pytest.raises(ValueError, match="first element is <html>"):
        list(read_dump(tmp_path / "other.xml", {}))


def test_hostile_markup_does_not_hang_or_crash() -> None:
    for text in ("{{" * 3000, "[[" * 3000, "{|" * 500, "<ref>" * 500, "'" * 3001, "=" * 999, "\0\x01 text", "<!-- open"):
        paragraphs(Page("X", text + " tail", LINKS))


def test_a_wiki_page_is_split_into_sentences() -> None:
    page = Page("X", "Dr. Smith came. He saw 3.5 apples! Then he left.\n\nA new paragraph", LINKS)
    assert sentences_of(RawDocument(page=page), "en") == [
        "Dr. Smith came.",
        "He saw 3.5 apples!",
        "Then he left.",
        "A new paragraph",
    ]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (
            "'''Aristotle''' ({{IPA|x}};<ref>y</ref> {{lang|z}} {{IPA|w}}, ''Aristotélēs''; 384 BC) was",
            "Aristotle (Aristotélēs; 384 BC) was",
        ),
        ("The Institute (ANSI, {{IPA|x}}) is", "The Institute (ANSI) is"),
        ("Andorra ({{IPA|x}}, {{IPA|y}}), officially", "Andorra, officially"),
        (
            "Apollo (Attic: {{lang|x}}, ''Apollōn''; Doric: {{lang|y}}, ''Apellōn'') is",
            "Apollo (Attic, Apollōn; Doric, Apellōn) is",
        ),
        ("burnt in Alexandria ({{circa}} 292)", "burnt in Alexandria (292)"),
        (": {{sym|x}}: Gothic letter", "Gothic letter"),
        ("at 10:30, 1,000 people (and so on), e.g. .NET; a:b", "at 10:30, 1,000 people (and so on), e.g. .NET; a:b"),
        ("half &#xD800; a &amp; b&nbsp;c &#x110000; &eacute;", "half a & b c &#x110000; é"),
        ("see [[:Category:Towns|the towns]] and [[:fr:Foo|foo]] [[be-x-old:Foo]][[zh-min-nan:X]]", "see the towns and foo"),
        ("[[Image:A.png|thumb|[[nested]] caption]]after", "after"),
        ("a <code>code</code> word<pre>int x[3] = {1};\n</pre>", "a code word"),
        ("H<sub>2</sub>O and <s>old</s> x<sup>2</sup>", "H2O and old x2"),
    ],
)
def test_a_line_is_cleaned(markup: str, text: str) -> None:
    assert " ".join(paragraphs(Page("X", markup, LINKS))) == text


def test_every_paragraph_can_be_encoded() -> None:
    for text in paragraphs(Page("X", "a &#xDFFF; b &#55296; c", LINKS)):
        text.encode("utf-8")


def test_memory_does_not_grow_with_the_dump(tmp_path: Path) -> None:
    import tracemalloc

    def peak(num_pages: int) -> int:
        path = tmp_path / f"{num_pages}.xml"
        path.write_bytes(dump(*(page_xml(f"A{i}", f"Text {i}. " * 100) for i in range(num_pages))))
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_dump(path, {})) == num_pages
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(4000) < 1.5 * peak(400)


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("{{convert|3|mi|km}}", "3 mi"),
        ("{{Convert|1,200|to|1,500|ft|m|abbr=on}}", "1,200 to 1,500 ft"),
        ("{{cvt|5}}", "5"),
        ("{{lang|fr|''mot''}}", "mot"),
        ("{{nowrap|two [[word]]s}}", "two words"),
        ("{{lang|fr}}", ""),
        ("{{unknown|text}}", ""),
        ("{{convert}}", ""),
    ],
)
def test_templates_that_stand_for_words_inside_a_sentence_are_words(markup: str, text: str) -> None:
    (line,) = paragraphs(Page("X", f"It is {markup} here.", LINKS))
    assert line == " ".join(f"It is {text} here.".split())
