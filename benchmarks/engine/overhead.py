"""What a cell costs beside its own work: Fairtrial and benchopt on the same trivial workload, side by side.

    python benchmarks/engine/overhead.py [--cells 10000] [--peer-cells 200] [--venv FOLDER]

Two candidates answer each cell at once, on one worker, every result stored. Benchopt is installed from ``benchopt.txt``
into an environment of its own, kept in ``--venv`` for the next time. It is given fewer cells, since it is slower; its
cost a cell is the slope between two runs, so that its start-up does not count, while ours is the whole run over the
number of cells, start-up, verdicts and files included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import fairtrial

HERE = Path(__file__).parent
CANDIDATES = {"half": 0.5, "third": 1 / 3}

OBJECTIVE = """
from benchopt import BaseObjective

class Objective(BaseObjective):
    name = "product"
    sampling_strategy = "run_once"

    def set_data(self, seed):
        self.seed = seed

    def get_objective(self):
        return {"seed": self.seed}

    def evaluate_result(self, score):
        return {"value": score}

    def get_one_result(self):
        return {"score": 0.0}
"""
DATASET = """
from benchopt import BaseDataset

class Dataset(BaseDataset):
    name = "cell"
    parameters = {"seed": list(range(CELLS))}

    def get_data(self):
        return {"seed": self.seed}
"""
SOLVER = """
from benchopt import BaseSolver

class Solver(BaseSolver):
    name = "NAME"
    sampling_strategy = "run_once"

    def set_objective(self, seed):
        self.seed = seed

    def run(self, _):
        self.score = FACTOR * self.seed

    def get_result(self):
        return {"score": self.score}
"""


def ours(cells: int, folder: Path) -> float:
    """Return the seconds of a comparison on ``cells`` cells in ``folder``."""
    began = time.perf_counter()
    result = fairtrial.compare(
        {name: (lambda cell, factor=factor: factor * cell) for name, factor in CANDIDATES.items()},
        cells=range(cells), baseline="third", metric=fairtrial.Metric("score"), out=folder, jobs=1, threads=1,
    )  # fmt: skip
    assert len(result.rows) == 2 * cells
    return time.perf_counter() - began


def peers(cells: int, folder: Path, python: Path) -> float:
    """Return the seconds of ``benchopt run`` on ``cells`` cells."""
    for name, text in (("objective.py", OBJECTIVE), ("datasets/cell.py", DATASET.replace("CELLS", str(cells)))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "solvers").mkdir()
    for name, factor in CANDIDATES.items():
        text = SOLVER.replace("NAME", name).replace("FACTOR", str(factor))
        (folder / "solvers" / f"{name}.py").write_text(text)
    command = [python, "-m", "benchopt", "run", folder, "-r", "1", "-n", "1", "-j", "1", "--no-plot", "--no-html"]
    began = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def peer_python(folder: Path) -> Path:
    """Return the Python of an environment that has benchopt, made where it is missing."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "-r", HERE / "benchopt.txt"]
        subprocess.run(install, check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--peer-cells", type=int, default=200)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "fairtrial-benchopt")
    options = parser.parse_args()
    python = peer_python(options.venv)
    few = max(1, options.peer_cells // 10)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        short = peers(few, folder / "short", python)
        first = ours(options.cells, folder / "ours")
        long = peers(options.peer_cells, folder / "long", python)
        again = ours(options.cells, folder / "ours")
    mine = 1e3 * first / (2 * options.cells)
    theirs = 1e3 * (long - short) / (2 * (options.peer_cells - few))
    print(f"{'':<34}{'cells x candidates':>20}{'ms a cell':>12}")
    print(f"{'fairtrial, whole run':<34}{f'{options.cells} x 2':>20}{mine:>12.2f}")
    print(f"{'fairtrial, all cells known':<34}{f'{options.cells} x 2':>20}{1e3 * again / (2 * options.cells):>12.2f}")
    print(f"{'benchopt, slope':<34}{f'{few} to {options.peer_cells} x 2':>20}{theirs:>12.2f}")
    print(f"ratio {theirs / mine:.1f} (wanted: 5 at least, and under 3 ms)")


if __name__ == "__main__":
    main()
