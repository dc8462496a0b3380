import pytest

from fairtrial.evaluation.language_development import Corpus, build_devbench, child_directed_speech, vocabulary


@pytest.fixture(scope="session")
def speech():
    """Generated speech, in three documents."""
    lines = child_directed_speech(800)
    return Corpus.from_documents(["\n".join(lines[i::3]) for i in range(3)])


@pytest.fixture(scope="session")
def words(speech):
    return vocabulary(speech)


@pytest.fixture(scope="session")
def bench(words):
    return build_devbench(words, per_cell=24)
