import pytest

from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
from fairtrial.lm.editing import Edit, Solver

QUICK = Solver(steps=4, prefixes=("", "w3 w8 "))


@pytest.fixture
def tiny():
    return tiny_causal_lm(layers=3)


@pytest.fixture(scope="session")
def texts():
    return tiny_texts(documents=6, words=120)


@pytest.fixture(scope="session")
def edits():
    return [
        Edit(
            "w4 {} w5" if i % 2 else "w4 w6 {} w5 w7",
            f"w{i}",
            f"w{i - 10} w11" if i % 3 else "w12",
            paraphrases=("w8 {} w5",),
            neighbours=((f"w4 w{i + 15} w5", "w9"),),
        )
        for i in range(20, 32)
    ]
