import pytest

from fairtrial.data import samples, text
from fairtrial.data.text import austen_novels, wiki_prose, wikipedia_articles
from fairtrial.errors import MissingSampleError


def fetched(name: str) -> bool:
    return samples.find_sample(name).folder.is_dir()


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("'''Bold''' and ''italic''", "Bold and italic"),
        ("a [[link]], a [[target|label]], [[:Category:Seen]]", "a link, a label, Category:Seen"),
        ("[[File:A.jpg|thumb|A caption with a [[link]] and {{convert|8|km|mi}}.]]Text.", "Text."),
        ("[[Category:Hidden]] [[de:Deutsch]] [[Image:x.png]] word", "word"),
        ("see [http://example.org the site] and [//example.org]", "see the site and"),
        ("8 {{convert|8|km|mi|abbr=on}} away", "8 8 km away"),
        ("{{lang|grc|[[wikt:en:a|logos]]}} and {{transl|grc|ISO|logos}}", "logos and logos"),
        ("x{{Infobox|name={{nowrap|y}}|z=[[a|b]]}}", "x"),
        ("Fact.<ref name=a>Book, p. 1.</ref> More.<ref name=a /> End.", "Fact. More. End."),
        ("Sum <math>\\frac{a}{{b}}</math> here<!-- hidden -->", "Sum here"),
        ("Albedo ({{IPA|x}}; {{lang|la|albedo}}) is", "Albedo (albedo) is"),
        ("Albedo ({{IPA|x}}) is", "Albedo is"),
        ("before\n{| class=x\n| a || b\n{|\n| inner\n|}\n|}\nafter", "before\nafter"),
        ("* one\n# two\n: three", "one\ntwo\nthree"),
        ("Lead.\n== Life ==\nBorn.\n=== Youth ===\nGrew.", "Lead.\nBorn.\nGrew."),
        ("Lead.\n== See also ==\n* [[Other]]\n== Death ==\nDied.", "Lead.\nDied."),
        ("5&nbsp;km &amp;ndash; 6 &lt;b&gt;", "5 km – 6 <b>"),
        ("__NOTOC__\n<br />\n----\nword <small>small</small>", "word small"),
    ],
)  # fmt: skip
def test_wiki_markup_leaves_its_words(markup, prose):
    assert wiki_prose(markup) == prose


def test_prose_has_no_blank_lines_and_no_double_spaces():
    assert wiki_prose("a\n\n\n  b   c \n\n") == "a\nb c"


def test_texts_not_fetched_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    for read, name in ((wikipedia_articles, "wikipedia-articles"), (austen_novels, "austen")):
        with pytest.raises(MissingSampleError, match=f"fairtrial samples get {name}"):
            read()


@pytest.mark.skipif(not fetched("wikipedia-articles"), reason="needs  fairtrial samples get wikipedia-articles")
def test_the_sample_has_89_articles_of_prose():
    articles = wikipedia_articles()
    assert len(articles) == 89
    assert articles[0].startswith("Anarchism is a political philosophy")
    assert 2.4e6 < sum(map(len, articles)) < 3e6
    assert min(map(len, articles)) >= text.SHORTEST_ARTICLE
    remains = ("[[", "{{", "<ref", "http://", "&nbsp;", "thumb|", "'''")
    assert not [mark for article in articles for mark in remains if mark in article]


@pytest.mark.skipif(not fetched("austen"), reason="needs  fairtrial samples get austen")
def test_the_six_novels_are_whole():
    pytest.importorskip("rdata")
    novels = austen_novels()
    assert list(novels) == [
        "Sense and Sensibility", "Pride and Prejudice", "Mansfield Park", "Emma", "Northanger Abbey", "Persuasion",
    ]  # fmt: skip
    assert sum(map(len, novels.values())) == 4_025_022
    assert "a single man in possession" in novels["Pride and Prejudice"]
