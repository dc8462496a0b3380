"""The page in a real browser: layout, colours, console, network."""

import shutil

import pytest

from fairtrial.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

# Pairs of texts that overlap by more than a pixel each way, within each figure and each axis.
OVERLAPS = """() => [...document.querySelectorAll('figure > svg, .ticks')].flatMap(figure => {
    const texts = [...figure.querySelectorAll('text, span')].map(t => [t.textContent, t.getBoundingClientRect()]);
    return texts.flatMap(([a, p], i) => texts.slice(i + 1)
        .filter(([, q]) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
                        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 2)
        .map(([b]) => a + ' | ' + b));
})"""
# Texts outside the figure or axis they belong to by more than the page's margin.
OUTSIDE = """() => [...document.querySelectorAll('figure > svg text, .ticks span')].filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < 0 || r.right > document.documentElement.clientWidth;
}).map(t => t.textContent)"""
WIDER = """() => [...document.querySelectorAll('main *')].filter(e => {
    if (e.closest('.scroll, .defs, .hidden, svg')) return false;
    return e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5;
}).map(e => e.tagName + '.' + e.className)"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(make, tmp_path_factory):
    """Three pages: a trial with every kind of claim, one of hostile names, and a catalogue."""
    root = tmp_path_factory.mktemp("pages")
    cells = make.cells(lost=3, diverged=2)
    whole = make.save(root / "whole", make.document(cells, make.SIX + make.MORE), cells, make.curves(cells))
    names = {
        "<b>" * 9: "method",
        "W" * 300: "baseline",
        "🎉 emoji 🎉": "control",
        "a b " * 40: "baseline",
        "": "reference",
    }
    cells = make.cells(names)
    claims = [make.claim("i" * 99, "t" * 999, quantity={"a": "<b>" * 9, "b": "W" * 300, "metric": "perplexity"})]
    hostile = make.save(
        root / "hostile", make.document(cells, claims, line="l" * 500, command="c" * 900, paper=["p" * 900]), cells
    )
    return {
        "whole": write_report([whole], root / "whole.html"),
        "hostile": write_report([hostile], root / "hostile.html"),
        "catalogue": write_report([whole, hostile], root / "catalogue.html"),
    }


@pytest.fixture
def visit(browser, pages):
    """Open a page and return it; afterwards nothing was complained of and nothing but the file was asked for."""
    seen, contexts = {"console": [], "requests": []}, []

    def open_page(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: seen["console"].append(message.text))
        tab.on("pageerror", lambda error: seen["console"].append(str(error)))
        tab.on("request", lambda request: seen["requests"].append(request.url))
        tab.goto(pages[name].as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert seen["console"] == []
    assert {url for url in seen["requests"] if not url.startswith("data:")} <= {p.as_uri() for p in pages.values()}


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", ["whole", "hostile", "catalogue"])
def test_nothing_is_wider_than_the_screen_and_no_texts_overlap(visit, name, width):
    tab = visit(name, width)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(WIDER) == []
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("width", [360, 1280])
def test_every_interval_is_drawn_on_its_strip(visit, width):
    tab = visit("whole", width)
    strips = tab.evaluate(
        "[...document.querySelectorAll('.strip')].map(s => { const r = s.getBoundingClientRect(); "
        "const i = s.querySelector('line.interval')?.getBoundingClientRect(); "
        "return [r.left, r.right, r.height, i?.left, i?.right] })"
    )
    assert len(strips) == 12
    for left, right, height, low, high in strips:
        assert right - left > 200
        assert 24 <= height <= 160
        assert low is None or (left <= low < high <= right + 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_figures_follow_the_colour_scheme(visit, scheme):
    tab = visit("whole", 768, scheme)
    colours = tab.evaluate(
        "[['body', 'backgroundColor'], ['figure text', 'fill'], ['.strip .interval', 'stroke'], ['.verdict', 'color']]"
        ".map(([query, property]) => getComputedStyle(document.querySelector(query))[property])"
    )
    ground, *inks = [sum(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) for c in colours]
    assert (ground > 700) == (scheme == "light")
    for ink in inks:
        assert abs(ink - ground) > 250


def test_text_is_large_enough_on_a_phone(visit):
    tab = visit("whole", 360)
    sizes = tab.evaluate(
        "[...document.querySelectorAll('figure > svg')]"
        ".map(s => 11 * s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
    )
    assert len(sizes) == 8
    assert min(sizes) >= 10
    assert tab.evaluate("parseFloat(getComputedStyle(document.querySelector('.who')).fontSize)") >= 16


def test_verdicts_differ_by_word_and_shape(visit):
    tab = visit("whole")
    pairs = tab.evaluate(
        "[...document.querySelectorAll('.judged .verdict')]"
        ".map(v => [v.textContent, v.querySelector('use').getAttribute('href')])"
    )
    shown = {(v, f"#v-{v.lower()}") for v in ("HOLDS", "FAILS", "UNDECIDED", "REPORTED")}
    assert {tuple(p) for p in pairs} == {*shown, ("not measured", "#v-unmeasured")}
    assert tab.evaluate(
        "[...document.querySelectorAll('.judged .icon')].every(i => i.getBoundingClientRect().width > 8)"
    )


def test_print_shows_everything_on_white(visit):
    tab = visit("catalogue", 720, "dark")
    hidden = "[...document.querySelectorAll('details td')].filter(e => !e.checkVisibility()).length"
    assert tab.evaluate(hidden) > 0
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate(hidden) == 0
    assert tab.pdf(format="A4").startswith(b"%PDF")


def test_a_link_of_the_front_table_opens_its_trial(visit):
    tab = visit("catalogue", 360)
    assert tab.locator("details.trial[open]").count() == 0
    tab.locator("a[href='#t2']").click()
    tab.wait_for_selector("details.trial:nth-of-type(2)[open]")


def test_the_keyboard_reaches_every_table(visit):
    tab = visit("whole", 360)
    assert tab.evaluate(
        "[...document.querySelectorAll('.scroll')].every(s => s.tabIndex === 0 && s.getAttribute('aria-label'))"
    )
