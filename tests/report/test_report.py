import math
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.report import figures, forest, page, words, write_report
from fairtrial.report.read import Claim, Document, read

VOID = {"meta", "link", "br", "hr", "img", "input", "use", "path", "circle", "rect", "line"}
HOSTILE = "<script>alert('x')</script>\"&amp;<img src=x onerror=alert(1)>"


class Reader(HTMLParser):
    """Collects what a browser would see, and fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.open, self.texts = [], [], [], [], []
        self.feed(text)
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if "href" in attributes:
            self.links.append(attributes["href"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def written(make, tmp_path_factory):
    """Write a page once and return (raw HTML, what a browser reads of it); by name."""
    root = tmp_path_factory.mktemp("report")
    done = {}

    def write(name, document, cells=None, items=None, **options):
        if name not in done:
            folder = make.save(root / name, document, cells, items)
            out = write_report([folder], root / f"{name}.html", **options)
            raw = out.read_text(encoding="utf-8")
            assert out.stat().st_size < page.LIMIT
            done[name] = raw, Reader(raw)
        return done[name]

    return write


@pytest.fixture(scope="module")
def six(make, written):
    cells = make.cells()
    return written("six", make.document(cells), cells)


@pytest.fixture(scope="module")
def every_kind(make, written):
    cells = make.cells(lost=3, diverged=2)
    return written("every kind", make.document(cells, make.SIX + make.MORE), cells, make.curves(cells))


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_title_says_the_outcome_in_one_sentence(six):
    assert "FiedlerPrune: 3 of 6 claims hold; 1 fails and 2 are undecided." in six[1].text
    assert "<title>FiedlerPrune: 3 of 6 claims hold; 1 fails and 2 are undecided.</title>" in six[0]


def test_the_scope_stands_under_the_headline_and_notes_with_what_was_compared(make, six, written):
    assert re.search(r"</h1>\s*<p class=\"scope\">model smollm2-135m · sparsities \[0.5, 0.7\] · draws 5</p>", six[0])
    cells = make.cells()
    notes = ["weights were stored in 4 bits and dequantised", "1 cell run again: code changed"]
    raw = written("noted", make.document(cells, notes=notes, summary=[]), cells)[0]
    compared = raw[raw.index("What was compared") : raw.index("Paired differences")]
    assert re.findall(r"<li>([^<]*)</li>", compared) == notes


def test_cost_says_what_it_counts(make, six, written):
    said = "Seconds of all cells and stages outside timed parts; a timed part measures cost, it is not cost."
    assert f"{said} Times are of this machine as it was." in six[1].text
    cells = make.cells()
    document = make.document(cells, [make.claim("C", "c", cost_ratio=None)], summary=[])
    document["parts"].pop()
    text = written("untimed", document, cells)[1].text
    assert "Seconds of all cells and stages." in text
    assert "timed parts" not in text
    assert "times the cost" not in text
    assert "1.83 times the cost" in six[1].text


def test_a_number_and_its_per_cent_sign_stay_together(make, written):
    cells = make.cells()
    claim = make.claim("C", "at 70 % sparsity")
    raw = written("per cent", make.document(cells, [claim], summary=[]), cells)[0]
    assert "at 70\u202f% sparsity" in raw


def test_a_mean_without_an_interval_says_so(make, written):
    cells = make.cells()
    document = make.document(cells, [])
    document["summary"][0] |= {"low": None, "high": None}
    assert "<small>–</small>" in written("no interval", document, cells)[0]


def test_trials_of_one_name_are_told_apart_by_their_folders(make, tmp_path):
    cells = make.cells(draws=2)
    document = make.document(cells, summary=[])
    folders = [make.save(tmp_path / name, document, cells) for name in ("a", "b/x", "c/x")]
    first = write_report(folders[:2], tmp_path / "two.html").read_text()
    assert all(f"<small>pruning in {name}</small>" in first for name in ("a", "x"))
    second = write_report(folders[1:], tmp_path / "three.html").read_text()
    assert all(f"<small>pruning in {name}</small>" in second for name in ("b/x", "c/x"))


def test_sections_come_in_the_order_of_the_specification(six):
    headings = re.findall(r"<h3>(.*?)</h3>", six[0])
    assert headings == [
        "What was compared, and why",
        "Paired differences",
        "Cost",
        "Full table",
        "Cells",
        "The claims in words, beside the paper’s",
        "Reproduce it",
    ]


def test_every_claim_and_each_of_its_parts_is_said_with_its_verdict(make, every_kind):
    raw, reader = every_kind
    articles = re.split(r'<article class="claim"', raw)[1:]
    claims = [c for claim in make.SIX + make.MORE for c in (claim, *claim["claims"])]
    assert len(articles) == len(claims)
    for claim, article in zip(claims, articles, strict=True):
        first = Reader("<article" + article.split("</p>")[0] + "</p></article>").text
        assert claim["text"] in first or claim["id"].startswith("C7[")
        said = "not measured" if claim["id"] == "C10" else claim["verdict"]
        assert f"</svg>{said}</span>" in article
    assert "5 units: a bootstrap needs 8." in reader.text
    assert "These parameters leave out 'SparseGPT'." in reader.text


def test_what_reproduces_it_is_there(six):
    text = six[1].text
    for said in ("fairtrial run pruning --set sparsity=0.5", "Example CPU @ 2.60GHz", "7.75 GiB", "torch 2.9.1",
                 "quality 0 to 4", "model smollm2-135m", "3f0c9d1f00aa77b1", "0f1e2d3c4b5a6978",
                 "2026-11-30 20:14:09 UTC"):  # fmt: skip
        assert said in text


def test_the_papers_word_is_marked_as_the_papers(make, six, written):
    paper = re.search(r'<aside class="paper">(.*?)</aside>', six[0], re.S)[1]
    assert "not measured here" in paper
    assert "Its abstract gives no figure." in paper
    assert six[0].count("Its abstract gives no figure.") == 1
    cells = make.cells()
    assert '<aside class="paper"' not in written("no paper", make.document(cells, paper=[], summary=[]), cells)[0]


def test_lost_cells_and_their_reasons_come_before_everything_else(every_kind):
    raw, reader = every_kind
    assert raw.index("3 cells of 60 were lost") < raw.index("What was compared")
    assert reader.text.index("LinAlgError: eigenvalues did not converge (fiedler.py:41)") < reader.text.index("Cost")
    assert "at draw 0, sparsity 0.5" in reader.text


def test_an_unfinished_run_says_so(make, written):
    cells = make.cells()
    document = make.document(cells, summary=[])  # no summary, no figures: quick
    document["parts"][0]["planned"] += 7
    assert "7 cells of 67 are not measured yet" in written("unfinished", document, cells)[1].text


def test_a_card_says_when_to_use_the_method(make, tmp_path):
    class Card:
        use_when, not_when = "You have a model.", "You have none."

    def lookup(name):
        if name != "pruning":
            raise UnknownNameError("trial", name, [])
        return Card()

    cells = make.cells()
    known = make.save(tmp_path / "known", make.document(cells, summary=[]), cells)
    own = make.save(tmp_path / "own", make.document(cells, trial="mine", summary=[]), cells)
    text = Reader(write_report([known], tmp_path / "a.html", card_lookup=lookup).read_text()).text
    assert "Use it when you have a model. Not when you have none." in text
    assert "Use it when" not in write_report([own], tmp_path / "b.html", card_lookup=lookup).read_text()


def test_a_pair_without_card_paper_items_or_command(make, written):
    cells = make.cells({"mine": "method", "base": "baseline"}, sparsities=(0.5,))
    claim = make.claim("mine", "mine is better than base", quantity={"a": "mine", "b": "base"})
    document = make.document(cells, [claim], trial="compare", method=None, line=None, paper=[], command=None)
    text = written("pair", document, cells)[1].text
    assert "compare: the one claim holds." in text
    assert "mine’s perplexity is 10.4" in text


def test_a_result_without_its_cells_is_a_page_too(make, written):
    document = make.document(make.cells(), summary=[])
    assert "there is no cells.parquet" in written("no cells", document)[1].text


def test_a_trial_that_claims_nothing(make, written):
    cells = make.cells()
    assert (
        "nothing is claimed; 0 quantities are reported."
        in written("nothing", make.document(cells, [], summary=[]), cells)[1].text
    )


def test_numbers_that_are_not_finite(make, written):
    cells = make.cells()
    claims = [
        make.claim("open", "open to the right", "UNDECIDED", high="inf"),
        make.claim("null", "not measured", "UNDECIDED", estimate=None),
        make.claim("point", "no interval", "UNDECIDED", low=None, high=None),
    ]
    document = make.document(cells, claims)
    document["summary"][0] |= {"mean": "inf", "low": None, "high": None}
    raw, reader = written("not finite", document, cells)
    assert raw.count('<use href="#e-right"/>') == 1
    assert "∞" in reader.text
    assert "nan" not in reader.text
    assert "None" not in reader.text


# ---------------------------------------------------------------------------------------------------------------- size


def test_ten_thousand_cells_are_summarised(make, written):
    cells = make.cells(draws=1000)
    raw, reader = written("ten thousand", make.document(cells), cells)
    assert "The first 200 of 10,000 cells" in reader.text
    assert "The other 9,800 are in cells.parquet" in reader.text
    assert "quality: 10,000 cells. How they spread" in reader.text
    assert len(raw.encode()) < 200_000


@pytest.mark.slow
def test_a_monstrous_trial_stays_below_the_limit(make, written):
    cells = make.cells(
        {f"candidate {i} {'x' * 100}": "baseline" for i in range(60)},
        draws=4,
        sparsities=[i / 20 for i in range(1, 20)],
    )
    children = [make.claim(f"M[{i}]", "part " * 50) for i in range(50)]
    claims = [make.claim(f"C{i}", "word " * 200, kind="all_of", children=children) for i in range(12)]
    lost = [
        {"part": "quality", "candidate": "c", "factors": {"draw": i}, "reason": f"reason {i} " * 99}
        for i in range(2000)
    ]
    document = make.document(
        cells, claims, lost=lost, notes=["note " * 500] * 100, parameters={f"p{i}": "v" * 9999 for i in range(2000)},
        command="fairtrial " * 99999, paper=["paper " * 9999] * 20,
    )  # fmt: skip
    written("monster", document, cells)


def test_a_catalogue_has_a_table_of_verdicts_and_a_section_a_trial(make, tmp_path):
    cells = make.cells(lost=1)
    whole = make.save(tmp_path / "whole", make.document(cells, make.SIX), cells)
    own = make.save(tmp_path / "own", make.document(cells, make.MORE, method=None, trial="mine"), cells)
    out = write_report([whole, own] * 28, tmp_path / "all.html")
    raw = out.read_text(encoding="utf-8")
    reader = Reader(raw)
    assert out.stat().st_size < page.LIMIT
    assert "140 of 280 claims hold; 28 fail and 84 are undecided; 28 are not measured here." in reader.text
    assert raw.count('<details class="trial">') == 56
    assert raw.count('class="strip') >= 28 * 5
    assert all(f'<a href="#t{i}">{"FiedlerPrune" if i % 2 else "mine"}</a>' in raw for i in range(1, 57))
    assert set(reader.ids) >= {f"t{i}" for i in range(1, 57)}
    assert len(set(reader.ids)) == len(reader.ids)


def test_few_trials_are_shown_in_full(make, tmp_path):
    cells = make.cells()
    folders = [make.save(tmp_path / name, make.document(cells), cells) for name in "ab"]
    raw = write_report(folders, tmp_path / "few.html").read_text(encoding="utf-8")
    assert raw.count("<h3>Full table</h3>") == raw.count("<h3>Reproduce it</h3>") == 2
    assert raw.count("<figure>") >= 6


# ------------------------------------------------------------------------------------------------------ self-contained


@pytest.fixture(scope="module")
def hostile(make, written):
    names = {
        HOSTILE: "method",
        "x" * 400: "baseline",
        "🎉 \u202eemoji $x^2$ \\n \x07": "control",
        "</svg></style>": "reference",
    }
    cells = make.cells(names)
    claims = [
        make.claim(HOSTILE, HOSTILE, quantity={"a": HOSTILE, "b": "x" * 400}, reason=HOSTILE),
        make.claim("y" * 300, "z" * 3000, "FAILS", kind="statistic", quantity={"name": HOSTILE}),
    ]
    document = make.document(
        cells, claims, trial=HOSTILE, method=HOSTILE, line=HOSTILE, finished=HOSTILE, preset=HOSTILE, command=HOSTILE,
        parameters={HOSTILE: HOSTILE}, inputs={HOSTILE: HOSTILE}, machine={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE}, notes=[HOSTILE], code={HOSTILE: {HOSTILE: HOSTILE}}, paper=[HOSTILE],
        seeds={HOSTILE: [HOSTILE]},
        lost=[{"part": HOSTILE, "candidate": HOSTILE, "factors": {HOSTILE: HOSTILE}, "reason": HOSTILE}],
    )  # fmt: skip
    document["parts"][0]["lost"] = 1
    document["parts"][0]["metrics"].append({"name": HOSTILE, "unit": HOSTILE, "higher_is_better": True})
    return written("hostile", document, cells)


@pytest.mark.parametrize("which", ["six", "every_kind", "hostile"])
def test_the_page_is_whole_and_alone(which, request):
    raw, reader = request.getfixturevalue(which)
    assert not {tag for tag, _ in reader.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert len(reader.ids) == len(set(reader.ids))
    assert all(link == "data:," or link[1:] in reader.ids for link in reader.links)
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", raw))
    assert not [attributes for _, attributes in reader.tags if "src" in attributes]
    assert "@import" not in raw
    assert "default-src 'none'" in raw


def test_hostile_text_is_shown_as_text(hostile):
    raw, reader = hostile
    assert reader.text.count(HOSTILE) > 20
    assert "<script" not in raw.lower()
    assert "\u202e" not in raw
    assert "\x07" not in raw


def test_the_same_results_give_the_same_bytes(make, tmp_path):
    cells = make.cells()
    folder = make.save(tmp_path / "a", make.document(cells), cells, make.curves(cells))
    first = write_report([folder], tmp_path / "1.html").read_bytes()
    assert write_report([folder], tmp_path / "deep" / "er" / "2.html").read_bytes() == first


def test_import_is_light_and_the_trial_machinery_is_never_loaded(make, tmp_path):
    cells = make.cells()
    folder = make.save(tmp_path / "a", make.document(cells, make.SIX[:1]), cells)
    script = f"""
        import sys
        import fairtrial.report
        assert not {{"numpy", "pandas", "matplotlib", "jinja2", "pydantic"}} & set(sys.modules)
        fairtrial.report.write_report([{str(folder)!r}], __import__("pathlib").Path({str(tmp_path / "a.html")!r}))
        assert not [name for name in sys.modules if name.startswith("fairtrial.trial")]
        assert "matplotlib.pyplot" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is damaged"),
        ("\x00\x01", "is damaged"),
        ("[]", "no schema number"),
        ('{"trial": "x"}', "no schema number"),
        ('{"schema": 2}', "schema 2, this Fairtrial reads up to 1: upgrade fairtrial"),
        ('{"schema": 1, "trial": "x"}', r"damaged at fairtrial \(Field required\)"),
    ],
)
def test_a_folder_without_a_result_that_can_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        write_report([tmp_path], tmp_path / "out.html")
    assert str(tmp_path / "result.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.html").exists()


def test_a_damaged_field_is_named(make, tmp_path):
    cells = make.cells()
    document = make.document(cells)
    document["claims"] = [make.claim("C1", "text", verdict="MAYBE")]
    with pytest.raises(InputError, match=r"damaged at claims\.0\.verdict"):
        write_report([make.save(tmp_path, document, cells)], tmp_path / "out.html")


@pytest.mark.parametrize("name", ["cells.parquet", "items.parquet"])
def test_a_damaged_table_is_named(make, tmp_path, name):
    make.save(tmp_path, make.document(make.cells()))
    (tmp_path / name).write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=f"{name} is damaged"):
        write_report([tmp_path], tmp_path / "out.html")


def test_no_folder_at_all(tmp_path):
    with pytest.raises(InputError, match="at least one folder"):
        write_report([], tmp_path / "out.html")


def test_a_place_that_cannot_be_written(make, tmp_path):
    cells = make.cells(draws=2)
    folder = make.save(tmp_path / "a", make.document(cells, summary=[]), cells)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_report([folder], tmp_path / "file" / "out.html")
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_report([folder], tmp_path / "taken.html")
    assert not list(tmp_path.glob("*.part"))


# --------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        ("H", "The one claim holds."),
        ("F", "The one claim fails."),
        ("U", "The one claim is undecided."),
        ("HH", "Both claims hold."),
        ("FFF", "All 3 claims fail."),
        ("UUU", "All 3 claims are undecided."),
        ("HHF", "2 of 3 claims hold; 1 fails."),
        ("HFF", "1 of 3 claims holds; 2 fail."),
        ("FFU", "None of 3 claims hold; 2 fail and 1 is undecided."),
        ("HHUURR", "2 of 4 claims hold; 2 are undecided."),
        ("R", "Nothing is claimed; 1 quantity is reported."),
        ("N", "The one claim is not measured here."),
        ("NN", "Both claims are not measured here."),
        ("HHN", "2 of 3 claims hold; 1 is not measured here."),
        ("HFUNN", "1 of 5 claims holds; 1 fails and 1 is undecided; 2 are not measured here."),
    ],
)
def test_headline(verdicts, sentence):
    names = {"H": "HOLDS", "F": "FAILS", "U": "UNDECIDED", "R": "REPORTED", "N": "UNMEASURED"}
    assert words.headline(names[v] for v in verdicts) == sentence


@settings(deadline=None)
@given(st.floats(min_value=-1e6, max_value=1e6).filter(lambda x: abs(x) > 1e-9))
def test_number_keeps_three_digits(value):
    read_back = float(words.number(value).replace("−", "-").replace(",", ""))
    assert math.isclose(read_back, value, rel_tol=6e-3)


@settings(deadline=None)
@given(st.floats(-3, 3), st.booleans())
def test_a_difference_of_logarithms_is_said_as_the_ratio_it_means(difference, higher):
    said = words.ratio(words.times(difference, higher)).replace("−", "-").replace(words.PERCENT, "")
    ratio = float(said[:-2]) if said.endswith(words.TIMES) else 1 + float(said) / 100
    assert math.isclose(ratio, math.exp(difference if higher else -difference), rel_tol=6e-3)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0123, "12 ms"), (4.21, "4.21 s"), (59.96, "60 s"), (75, "1 min 15 s"), (7500, "2 h 05 min"), (2e5, "2 d 07 h")],
)
def test_duration(seconds, said):
    assert words.duration(seconds) == said


def test_an_estimate_has_the_decimals_its_interval_deserves():
    assert words.estimate(0.123456, 0.1, 0.15) == ("0.123", "0.100", "0.150")
    assert words.estimate(1234.5, 1200, 1270) == ("1,234", "1,200", "1,270")
    assert words.estimate(-0.00004, -0.0014, 0.0013) == ("−0.00004", "−0.0014", "0.0013")
    assert words.estimate(0.5, math.nan, math.nan) == ("0.5", words.MISSING, words.MISSING)
    assert words.estimate(0.5, 0.1, math.inf) == ("0.5", "0.1", "∞")


def test_what_a_log_difference_says_of_a_cost(make):
    document = Document.model_validate(make.document(make.cells()))
    cost = next(claim for claim in document.claims if claim.id == "C5")
    said = words.outcome(cost, document.part(cost.part)).replace("\u202f", " ")
    assert said == "FiedlerPrune’s pruning time is 1.82 × Wanda’s; 98.3 % interval 1.63 to 2.03 ×."
    assert words.bound(cost, document.part(cost.part)) == "at most 3\u202f×"


@pytest.mark.parametrize(
    ("metric", "bound", "said"),
    [
        ("accuracy", {"above": math.log(0.98)}, "at least 0.98 ×"),
        ("accuracy", {"above": 0.0}, "above 1 ×"),
        ("perplexity", {"above": 0.0}, "below 1 ×"),
        ("perplexity", {"above": math.log(2)}, "at most 0.5 ×"),
    ],
)
def test_what_a_claim_asks_of_a_ratio(make, metric, bound, said):
    document = Document.model_validate(make.document(make.cells(draws=2)))
    claim = Claim.model_validate(make.claim("C", "c", quantity={"metric": metric}, bound=bound))
    assert words.bound(claim, document.part("quality")).replace("\u202f", " ") == said


def test_a_claim_is_unmeasured_only_where_nothing_of_it_was_tried(make):
    def state(*args, **fields):
        return Claim.model_validate(make.claim("C", "c", *args, **fields)).state

    left_out = {"estimate": None, "reason": "these parameters leave out 'b'"}
    part = make.claim("P", "p", "UNDECIDED", **left_out)
    assert state("UNDECIDED", **left_out) == "UNMEASURED"
    assert state("UNDECIDED", kind="all_of", children=[part, part]) == "UNMEASURED"
    assert state("UNDECIDED", kind="all_of", children=[part, make.claim("Q", "q")]) == "UNDECIDED"
    assert state("UNDECIDED", **left_out, lost=3) == "UNDECIDED"
    assert state("UNDECIDED", **left_out, kind="exact") == "UNDECIDED"
    assert state("UNDECIDED", reason="crosses the bound") == "UNDECIDED"
    assert state("HOLDS") == "HOLDS"


# -------------------------------------------------------------------------------------------------------------- forest


@pytest.fixture(scope="module")
def document_with(make):
    bare = make.document(make.cells(draws=2))
    return lambda claims: Document.model_validate({**bare, "claims": claims})


def test_claims_of_one_unit_share_a_scale_and_others_do_not(make, document_with):
    groups = forest.groups(document_with(make.SIX + make.MORE))
    rows = {row.claim.id: group.title for group in groups for row in group.rows}
    assert rows["C1a"] == rows["C1b"] == rows["C3"] == rows["C3.permuted"] == "Ratio of perplexity"
    assert rows["C6"] == "Ratio of perplexity, on another scale"
    assert rows["C2"] == rows["C7[sparsity=0.7]"] == "Difference in accuracy (share of answers)"
    assert rows["R1"] == "Mean accuracy (share of answers)"
    assert rows["C8"] == rows["C10"] == "Without an interval"
    assert sorted(rows) == sorted({c["id"] for claim in make.SIX + make.MORE for c in (claim, *claim["claims"])})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(1e-3, 0.5), st.floats(-0.5, 0.5), st.booleans()), min_size=1, max_size=6
    )
)
def test_an_interval_is_drawn_inside_the_shade_iff_it_is_inside_the_bound(make, document_with, drawn):
    claims = [
        make.claim(f"C{i}", "t", estimate=estimate, half=half, bound={"above" if above else "below": bound})
        for i, (estimate, half, bound, above) in enumerate(drawn)
    ]
    rows = [row for group in forest.groups(document_with(claims)) for row in group.rows]
    assert len(rows) == len(drawn)
    for row in rows:
        start, width = row.claimed
        side, bound = next(iter(row.claim.bound.items()))
        assert 0 <= row.low <= row.point <= row.high <= 100
        assert not row.beyond_low
        assert not row.beyond_high
        if abs(row.claim.low - bound) > 1e-2 and abs(row.claim.high - bound) > 1e-2:
            inside = row.claim.low > bound if side == "above" else row.claim.high < bound
            assert inside == (start <= row.low and row.high <= start + width)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_their_labels_differ(low, span):
    positions = forest.ticks(low, low + span)
    labels = forest.tick_labels(positions)
    assert len(positions) <= 7
    if span > 1e-3 * abs(low):
        assert len(set(labels)) == len(labels)


def test_labels_of_close_ticks_differ():
    assert forest.tick_labels([0.69, 0.69 + 1e-9]) == ["0.69", "0.690000001"]


def test_the_axis_of_a_ratio_has_round_ratios(make, document_with):
    cost = make.claim("C", "c", estimate=-0.3, half=1.0, bound={"above": -math.log(3)})  # perplexity: lower is better
    group = forest.groups(document_with([cost]))[0]
    labels = [tick.label.replace("\u202f", " ") for tick in sorted(group.ticks, key=lambda tick: tick.at)]
    assert labels == ["2.0 ×", "1.0 ×", "0.5 ×"]
    row = group.rows[0]
    assert (row.numbers + ", " + row.interval).replace("\u202f", " ") == "1.35 ×, 0.497 to 3.67 ×"


def test_parts_of_a_composite_claim_follow_it(make, document_with):
    group = forest.groups(document_with(make.SIX))[0]
    ids = [row.claim.id for row in group.rows]
    assert ids[ids.index("C3") :][:3] == ["C3", "C3.permuted", "C3.blockwide"]
    assert [bool(row.parent) for row in group.rows if row.claim.id.startswith("C3")] == [False, True, True]


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def recorded(make, tmp_path_factory):
    cells = make.cells(lost=1, diverged=2)
    folder = tmp_path_factory.mktemp("figures")
    return read(make.save(folder, make.document(cells), cells, make.curves(cells)))


def test_figures_show_what_the_claims_are_about(recorded):
    panels = [(p.metric.name, p.where["sparsity"]) for p in figures.panels(recorded.document)]
    assert panels == [("perplexity", 0.5), ("perplexity", 0.7), ("accuracy", 0.5), ("accuracy", 0.7)]


def test_figures_take_colours_and_fonts_from_the_page(recorded):
    panel = figures.panels(recorded.document)[0]
    drawn = [
        figures.cost_quality(recorded.document, panel, "a"),
        figures.cell_dots(recorded, panel, "b"),
        *(figures.curves(recorded, part, metric, "c") for part, metric in figures.curve_metrics(recorded)),
    ]
    assert len(drawn) == 3
    for figure in drawn:
        assert not re.search(r"#[0-9a-f]{6}", figure.svg)
        assert "font-family" not in figure.svg
        assert "var(--" in figure.svg
        assert "<text" in figure.svg
        assert figure.svg.startswith("<svg viewBox=")
        assert 'role="img" aria-label="' in figure.svg
        assert len(figure.svg) < 40_000
    assert ">FiedlerPrune<" in drawn[0].svg
    assert "lost" in drawn[1].svg
    assert {key.label for key in drawn[2].keys} == set(recorded.cells["candidate"])


def test_a_control_does_not_squash_the_others(recorded):
    svg = figures.cell_dots(recorded, figures.panels(recorded.document)[0], "x").svg
    assert "random mask, off the scale at" in svg
    assert ">25.0<" in svg


def test_a_metric_that_does_not_apply_leaves_its_candidate_out(make, tmp_path):
    cells = make.cells()
    cells.loc[cells["candidate"] != "Wanda", "accuracy"] = None
    recorded = read(make.save(tmp_path, make.document(cells), cells))
    panel = next(p for p in figures.panels(recorded.document) if p.metric.name == "accuracy")
    svg = figures.cell_dots(recorded, panel, "x").svg
    assert ">Wanda<" in svg
    assert ">magnitude<" not in svg
    assert figures.cost_quality(recorded.document, panel, "x") is None


@pytest.mark.parametrize("but", [None, "dense"], ids=["all", "all but the reference"])
def test_what_does_not_vary_is_not_drawn(make, tmp_path, but):
    cells = make.cells()
    cells.loc[cells["candidate"] != but, "accuracy"] = 0.63
    recorded = read(make.save(tmp_path, make.document(cells), cells))
    panel = next(p for p in figures.panels(recorded.document) if p.metric.name == "accuracy")
    assert figures.cell_dots(recorded, panel, "x") is None
    assert figures.cost_quality(recorded.document, panel, "x") is None


def test_cells_are_found_where_another_part_turned_their_factor_into_floats(make, tmp_path):
    cells = make.cells(sparsities=(1, 2))
    recorded = read(make.save(tmp_path, make.document(cells), cells.astype({"sparsity": float, "draw": float})))
    drawn = [figures.cell_dots(recorded, panel, "x") for panel in figures.panels(recorded.document)]
    assert len(drawn) == 4
    assert all(figure.svg.count("<use") > 20 for figure in drawn)


def test_many_candidates_are_drawn_in_part(make, tmp_path):
    cells = make.cells({f"c{i}": "baseline" for i in range(30)}, draws=2, sparsities=(0.5,))
    recorded = read(make.save(tmp_path, make.document(cells), cells))
    assert (
        "6 further candidates in the full table."
        in figures.cell_dots(recorded, figures.panels(recorded.document)[0], "x").note
    )


def test_roles_have_a_shape_each():
    assert len({marker["marker"] for marker in figures.MARKERS.values()}) == 4


def test_labels_of_points_do_not_meet(recorded):
    taken = []
    for i in range(12):
        spot = figures._free_spot((100 + i, 100), 60, taken, (50, 40, 330, 240))
        if spot is not None:
            box = (spot[0], spot[1] - 6, spot[0] + 60, spot[1] + 6)
            assert not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
            taken.append(box)
    assert len(taken) > 6


# ------------------------------------------------------------------------------------------------------------- colours


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
def test_text_stands_out_from_its_ground(scheme):
    css = Path(page.__file__).with_name("page.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", re.findall(r":root \{(.*?)\}", css, re.S)[scheme]))
    full = {name: c if len(c) == 7 else "#" + "".join(2 * x for x in c[1:]) for name, c in colours.items()}
    for ink, ground in [(c, "paper") for c in ("ink", "muted", "accent", "holds", "fails", "undecided", "reported")] + [
        ("warn-ink", "warn"), ("ink", "warn"), ("muted", "raised"), ("ink", "raised")]:  # fmt: skip
        high, low = sorted((luminance(full[ink]), luminance(full[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def test_a_nested_composite_claim_keeps_all_its_leaves(make):
    inner = make.claim("B", "b", kind="all_of", children=[make.claim("B1", "b1"), make.claim("B2", "b2")])
    claim = Claim.model_validate(make.claim("A", "a", kind="all_of", children=[inner, make.claim("A1", "a1")]))
    assert [leaf.id for leaf in claim.leaves()] == ["B1", "B2", "A1"]
