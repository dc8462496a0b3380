"""What is computed again: a synthetic system is edited on disk, and the cells that run are watched."""

import importlib
import sys

import pytest

import fairtrial
from fairtrial.trial import code
from fairtrial.trial.engine import Run
from fairtrial.trial.progress import Silent
from fairtrial.trial.result import collect

FILES = {
    "__init__.py": "",
    "shared.py": 'SCALE = 2.0\n\ndef scale(x):\n    """Scale."""\n    return SCALE * x  # a comment\n',
    "fiedler.py": """'The method.'
from fairtrial.zz.pruning.shared import scale

def prune(x):
    return scale(x) + 1
""",
    "wanda.py": """
from fairtrial.zz.pruning.shared import scale

def prune(x):
    return scale(x)
""",
    "trial.py": """
from pydantic import BaseModel, Field
from fairtrial.trial.declare import Candidate, Claim, Factor, Metric, Part, Trial, difference
from fairtrial.zz.pruning import fiedler, wanda

METHODS = {"fiedler": fiedler.prune, "wanda": wanda.prune}
OFFSET = 0.0

class Params(BaseModel):
    seeds: int = Field(5, json_schema_extra={"scope": "plan"})
    sparsity: float = 0.5

def measure(candidate, cell, params, stages):
    return {"score": METHODS[candidate.label](cell["seed"] + params.sparsity) + OFFSET}

def parts(params):
    return (
        Part(
            name="main",
            candidates=tuple(Candidate(name, "method", uses=(name,)) for name in METHODS),
            metrics=(Metric("score"),),
            factors=(Factor("seed", range(params.seeds), kind="replicate"),),
            variance="independent",
            claims=(Claim("C1", "fiedler beats wanda", difference("fiedler", "wanda", "score"), above=0),),
            measure=measure,
        ),
    )

trial = Trial("pruning", Params, parts)
""",
}


class Ran(Silent):
    def __init__(self):
        self.rows = []

    def finished(self, row):
        self.rows.append(row)


class System:
    """A system in a temporary ``fairtrial.zz.pruning`` that can be edited and run."""

    def __init__(self, folder, out):
        self.folder, self.out = folder, out
        for name, text in FILES.items():
            (folder / name).write_text(text)

    def edit(self, file, old, new):
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new))

    def run(self, **params):
        """Return the (candidate, seed) pairs that ran, and what was said about them."""
        for name in [name for name in sys.modules if name.startswith("fairtrial.zz")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        code._parsed.cache_clear()  # several edits within one tick of the file system's clock
        module = importlib.import_module("fairtrial.zz.pruning.trial")
        watcher = Ran()
        run = Run(
            "fairtrial.zz.pruning.trial:trial", module.Params(**params), self.out, engine="inline", watcher=watcher
        )
        notes = run.explain_missing(run.rows())
        run.execute(run.rows())
        self.result = collect(run)
        run.close()
        return [(row.candidate, row.factors["seed"]) for row in watcher.rows], notes


@pytest.fixture
def system(tmp_path, monkeypatch, inline):
    package = tmp_path / "src" / "fairtrial"
    folder = package / "zz" / "pruning"
    folder.mkdir(parents=True)
    (package / "zz" / "__init__.py").touch()
    monkeypatch.setattr(fairtrial, "__path__", [*fairtrial.__path__, str(package)])
    monkeypatch.setattr(code, "PACKAGE", package)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within the same second must be seen
    code.module_file.cache_clear()
    yield System(folder, tmp_path / "out")
    code.module_file.cache_clear()
    for name in [name for name in sys.modules if name.startswith("fairtrial.zz")]:
        del sys.modules[name]


def test_the_same_cell_is_never_computed_twice(system):
    ran, notes = system.run()
    assert len(ran) == 10
    assert notes == []
    assert system.run() == ([], [])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("shared.py", "# a comment", "# another"),
        ("shared.py", '"""Scale."""', '"""Multiply by the scale."""'),
        ("fiedler.py", "'The method.'\n", "'The method, in other words.'\n\n\n"),
        ("trial.py", "fiedler beats wanda", "fiedler is better than wanda"),
        ("trial.py", "def parts(params):\n", "def unused():\n    return 3\n\ndef parts(params):\n"),
    ],
)
def test_comments_docstrings_claims_and_unused_code_hit(system, file, old, new):
    system.run()
    system.edit(file, old, new)
    assert system.run() == ([], [])


def test_a_constant_edit_misses_and_explains_itself(system):
    system.run()
    system.edit("shared.py", "SCALE = 2.0", "SCALE = 3.0")
    ran, notes = system.run()
    assert len(ran) == 10
    assert notes == ["10 cells run again: zz/pruning/shared.py changed"]


def test_editing_the_method_leaves_the_baselines_cells(system):
    system.run()
    system.edit("fiedler.py", "+ 1", "+ 5")
    ran, notes = system.run()
    assert {candidate for candidate, _ in ran} == {"fiedler"}
    assert notes == ["5 cells run again: zz/pruning/fiedler.py changed"]


@pytest.mark.parametrize(("old", "new"), [("OFFSET = 0.0", "OFFSET = 1.0"), ("+ OFFSET", "- OFFSET")])
def test_what_measure_uses_of_its_own_module_counts(system, old, new):
    system.run()
    system.edit("trial.py", old, new)
    assert len(system.run()[0]) == 10


def test_more_seeds_run_only_the_new_ones(system):
    system.run(seeds=5)
    ran, notes = system.run(seeds=8)
    assert sorted({seed for _, seed in ran}) == [5, 6, 7]
    assert len(ran) == 6
    assert notes == []


def test_a_parameter_that_results_depend_on_misses_and_explains_itself(system):
    system.run()
    ran, notes = system.run(sparsity=0.7)
    assert len(ran) == 10
    assert notes == ["10 cells run again: sparsity changed"]


def test_old_rows_stay_so_switching_back_hits_and_no_verdict_mixes_two_digests(system):
    system.run()
    first = system.result.verdicts[0].difference
    assert first == pytest.approx(1.0)
    system.edit("fiedler.py", "+ 1", "+ 5")
    system.run()
    assert system.result.verdicts[0].difference == pytest.approx(5.0)
    for candidate in ("fiedler", "wanda"):
        assert len({str(row.code) for row in system.result.rows if row.candidate == candidate}) == 1
    system.edit("fiedler.py", "+ 5", "+ 1")
    assert system.run() == ([], [])
    assert system.result.verdicts[0].difference == first


def test_a_version_of_an_imported_distribution_counts(system, monkeypatch):
    system.edit("shared.py", "SCALE = 2.0", "import numpy\nSCALE = 2.0")
    system.run()
    monkeypatch.setattr(code, "distributions", lambda top: ((top, "99.0"),))
    ran, notes = system.run()
    assert len(ran) == 10
    assert "numpy changed" in notes[0]
