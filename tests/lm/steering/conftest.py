import pytest

from fairtrial.data.tiny import tiny_causal_lm


@pytest.fixture(scope="session")
def tiny():
    return tiny_causal_lm(layers=4)


@pytest.fixture(scope="session")
def anchors():
    return [f"w{3 + i} w{20 + 7 * i % 40} w{5 + 3 * i % 50}" for i in range(40)]
