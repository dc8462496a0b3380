import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairtrial import cards as catalogue
from fairtrial.cards import AREAS, Card, cards, find, read_card
from fairtrial.data.samples import list_samples
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.trial.declare import Report

CARD = """
name = "pruning"
method = "FiedlerPrune"
area = "lm"
line = "Prune."
state = "planned"
use_when = "Always."
not_when = "Never."
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "lm" / "pruning" / "card.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_there_are_56_systems_in_ten_areas_and_one_study_of_the_engine():
    systems = [card for card in cards().values() if card.is_system]
    assert len(systems) == 56
    assert {card.area for card in systems} == AREAS.keys() - {"engine"}
    assert [card.name for card in cards().values() if not card.is_system] == ["verdicts"]


def test_cards_come_in_the_order_of_areas_then_names():
    order = [(list(AREAS).index(card.area), card.name) for card in cards().values()]
    assert order == sorted(order)


@pytest.mark.parametrize("card", cards().values(), ids=cards())
def test_every_card_says_what_a_reader_needs(card: Card):
    assert card.line.endswith(".")
    assert card.use_when.endswith(".")
    assert card.not_when.endswith(".")
    if card.is_system:
        assert card.paper
        assert card.claims
        assert card.extras
    assert set(card.samples) <= set(list_samples())
    for text in (card.line, card.use_when, card.not_when, *card.paper, *(claim.text for claim in card.claims)):
        assert text == " ".join(text.split())


@pytest.mark.parametrize("card", [card for card in cards().values() if card.state == "planned"], ids=lambda c: c.name)
def test_a_planned_system_is_a_card_and_nothing_else(card: Card):
    folder = Path(catalogue.__file__).parent / card.area / card.name
    assert [file.name for file in folder.iterdir() if file.name != "__pycache__"] == ["card.toml"]


@pytest.mark.parametrize("card", [card for card in cards().values() if card.state == "working"], ids=lambda c: c.name)
def test_a_working_system_names_modules_that_exist(card: Card):
    for target in (card.trial, *card.commands.values()):
        module = target.partition(":")[0]
        assert importlib.util.find_spec(module) is not None, f"{card.name}: no module {module}"


def test_extras_are_those_of_the_package():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    declared = set(re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    assert {extra for card in cards().values() for extra in card.extras} <= declared


@pytest.mark.parametrize("name", ["pruning", "FiedlerPrune", "fiedler prune", "FIEDLER_PRUNE", "fiedler-prune"])
def test_find_accepts_any_of_a_cards_names(name):
    assert find(name).name == "pruning"


@pytest.mark.parametrize("card", cards().values(), ids=cards())
def test_every_name_of_every_card_finds_it(card: Card):
    assert {find(name).name for name in card.names} == {card.name}


def test_an_unknown_name_suggests_the_nearest_of_all_names():
    with pytest.raises(UnknownNameError, match="did you mean 'pruning'"):
        find("prunning")
    with pytest.raises(UnknownNameError, match="did you mean 'FiedlerPrune'"):
        find("FidlerPrune")


def test_a_card_without_the_optional_keys_is_enough(tmp_path):
    card = read_card(write(tmp_path, CARD))
    assert (card.shown, card.aliases, card.commands, card.trial) == ("pruning", (), {}, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + "colour = 'red'", "unknown key 'colour'"),
        (lambda text: text.replace('method = "FiedlerPrune"', ""), "the key 'method' is missing"),
        (lambda text: text.replace('"FiedlerPrune"', "7"), "method: expected a string, got 7"),
        (lambda text: text + "aliases = 'one'", "aliases: expected a list of strings"),
        (lambda text: text + "aliases = [1]", "aliases: expected a list of strings"),
        (lambda text: text + "claims = ['C1']", r"claims: expected a list of tables \{id, text\}"),
        (lambda text: text + "claims = [{id = 'C1', text = 'a'}, {id = 'C1', text = 'b'}]", "claims: two claims share"),
        (lambda text: text.replace('"lm"', '"ml"'), "area: 'ml' is not one of"),
        (lambda text: text.replace('"lm"', '"rl"'), "area: 'rl' is not the folder's area 'lm'"),
        (lambda text: text.replace('"pruning"', '"prune"'), "name: 'prune' is not the folder's name 'pruning'"),
        (lambda text: text.replace('"planned"', '"done"'), "state: 'done' is not one of"),
        (lambda text: text.replace('"planned"', '"working"'), "trial: a working system has a trial"),
        (lambda text: text + "commands = {prune = 'fairtrial.a:b'}", "commands: a planned system has none"),
        (
            lambda text: text.replace('"planned"', '"working"') + "trial = 'somewhere'",
            "trial: 'somewhere' is not of the form",
        ),
        (lambda text: text.replace('"Prune."', '"""Two\nlines"""'), "line: must be exactly one line"),
        (lambda text: text + "name =", "not a TOML file"),
    ],
)
def test_a_malformed_card_is_refused_naming_file_and_key(tmp_path, change, message):
    file = write(tmp_path, change(CARD))
    with pytest.raises(InputError, match=message) as caught:
        read_card(file)
    assert str(file) in str(caught.value)


def test_two_cards_may_not_share_a_name():
    one, other = cards()["pruning"], cards()["drafting"]
    twin = Card(**{**{key: getattr(other, key) for key in Card.__slots__}, "aliases": ("Fiedler prune",)})
    with pytest.raises(InputError, match="belongs to both lm/pruning and lm/drafting"):
        catalogue._by_any_name([one, twin])


def test_reading_the_catalogue_imports_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import fairtrial.cards as c, fairtrial.data.samples as s;"
        "c.cards(); s.list_samples(); new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['fairtrial']"


@pytest.mark.parametrize("card", [card for card in cards().values() if card.state == "working"], ids=lambda c: c.name)
def test_the_claims_of_a_working_system_are_those_of_its_trial(card: Card):
    module, _, name = card.trial.partition(":")
    trial = getattr(importlib.import_module(module), name)
    claims = [claim for part in trial.parts(trial.params()) for claim in part.claims]
    judged = {claim.id for claim in claims if not isinstance(claim, Report)}
    stated = {claim.id for claim in card.claims}
    assert judged <= stated <= {claim.id for claim in claims}
