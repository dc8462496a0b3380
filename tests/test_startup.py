"""Start-up: what a fresh interpreter has loaded, by module names."""

import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "pydantic",
    "pandas",
    "scipy",
    "torch",
    "matplotlib",
    "pyarrow",
    "sklearn",
    "transformers",
    "rich.live",
)
STATISTICS = {"numpy", "scipy"}


def loaded(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after ``code``."""
    text = (
        f"import sys, contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def command(*arguments: str) -> str:
    return f"from fairtrial.cli import run_app; assert run_app({list(arguments)}) == 0"


@pytest.mark.parametrize(
    "code",
    [
        "import fairtrial, fairtrial.cards, fairtrial.errors, fairtrial.seeds, fairtrial.trial",
        command("list"),
        command("list", "--json"),
        command("--help"),
        command("run", "--help"),
        command("show", "pruning", "--json"),
        command("show", "pruning"),
        command("samples", "list"),
        command("doctor"),
    ],
)
def test_nothing_heavy_is_loaded(code):
    found = loaded(code)
    assert "fairtrial" in found
    assert not found.intersection(HEAVY)


def test_statistics_use_scipy_special_and_never_scipy_stats():
    found = loaded("import fairtrial.stats")
    assert "scipy.special" in found
    assert "scipy.stats" not in found
    assert not found.intersection(set(HEAVY) - STATISTICS)


def test_a_worker_loads_no_frames_figures_or_scipy_stats_of_its_own():
    found = loaded("import fairtrial.trial.worker")
    assert not found.intersection({"pandas", "matplotlib", "pyarrow", "torch", "scipy.stats", "sqlite3.dbapi3", "rich"})


def test_every_public_name_is_there_and_no_other():
    import fairtrial

    assert set(dir(fairtrial)) == set(fairtrial.__all__)
    for name in fairtrial.__all__:
        assert getattr(fairtrial, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fairtrial.nothing  # noqa: B018
