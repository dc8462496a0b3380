import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairtrial.cards import cards, find

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def catalogue():
    spec = importlib.util.spec_from_file_location("catalogue", ROOT / "scripts" / "catalogue.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The documentation, built strictly."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder


def test_the_readme_is_up_to_date(catalogue):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == catalogue.readme(text), "run  python scripts/catalogue.py README.md"


def test_the_readme_lists_all_56_methods_with_their_state(catalogue):
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition(catalogue.BEGIN)[2].partition(catalogue.END)[0]
    rows = [line for line in table.splitlines() if re.search(r"\| (planned|working)\b.*\|$", line)]
    assert len(rows) == 56
    assert sum("| working" in row for row in rows) == sum(
        c.is_system and c.state == "working" for c in cards().values()
    )


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith(("http", "#")) and not (ROOT / link).exists()] == []


def test_a_text_without_markers_is_refused(catalogue):
    with pytest.raises(SystemExit, match="lacks the markers"):
        catalogue.readme("# Title")


def test_every_system_has_a_page_with_its_claims(site):
    for card in cards().values():
        if card.is_system:
            page = (site / "systems" / card.shown / "index.html").read_text(encoding="utf-8")
            assert all(f"<strong>{claim.id}</strong>" in page for claim in card.claims)
            assert "What the paper states" in page


def test_the_pages_load_nothing_from_elsewhere(site):
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"', text)
        assert [url for pair in loaded for url in pair if url.startswith(("http", "//"))] == [], file


def test_a_measured_system_shows_its_verdicts(catalogue, monkeypatch):
    claim = {
        "id": "C1", "text": "It wins.", "verdict": "HOLDS", "difference": 0.1234, "low": 0.05, "high": "inf",
        "cells": 5, "lost": 1, "reason": None, "units": 5, "quantity": {"kind": "difference", "metric": "score"},
    }  # fmt: skip
    other = claim | {
        "id": "C2",
        "verdict": "UNDECIDED",
        "difference": None,
        "low": None,
        "reason": "too few",
        "lost": 0,
    }
    gone = other | {"id": "C3", "reason": "left out", "units": 0, "cells": 0}
    cost = claim | {"id": "C4", "quantity": {"kind": "difference", "metric": "score", "scale": "log"}, "high": 0.2}
    document = {
        "claims": [claim, other, gone, cost], "finished": "2026-11-30T20:00:00", "command": "fairtrial run pruning",
        "fairtrial": "0.1.0", "trial": "pruning", "parts": [], "summary": [], "costs": [], "lost": [],
    }  # fmt: skip
    monkeypatch.setattr(catalogue, "result", lambda card: json.loads(json.dumps(document)))
    monkeypatch.setattr(catalogue, "_is_older", lambda document: True)
    monkeypatch.setattr(catalogue, "_figure", lambda document: ["the figure"])
    card = find("pruning")
    page = catalogue.system_page(card, "By hand.")
    assert "| **C1** It wins. | HOLDS | 0.123 | 0.05 to inf | 5, 1 lost |" in page
    assert "| **C2** It wins. (too few) | UNDECIDED |  |  | 5 |" in page
    assert "| **C3** It wins. (left out) | not measured |  |  |  |" in page
    assert "| **C4** It wins. | HOLDS | 1.13 × | 1.05 to 1.22 × | 5, 1 lost |" in page
    assert "Measured on 2026-11-30 by `fairtrial run pruning`, with other code" in page
    assert "By hand." in page
    assert "the figure" in page
    assert catalogue._state(card) == "working: 2 HOLDS, 1 UNDECIDED, 1 not measured"


def test_the_reason_not_to_run_a_block_becomes_its_title(catalogue):
    class Page:
        class file:
            src_uri = "quickstart.md"

    text = catalogue.on_page_markdown("```bash no-run needs a GPU\nfairtrial list\n```", Page, None, None)
    assert text == '```bash title="needs a GPU"\nfairtrial list\n```'
