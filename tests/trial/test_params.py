from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.trial.declare import Input, Trial
from fairtrial.trial.params import input_digests, key_of, make_params, parse_settings


class Params(BaseModel):
    sparsity: float = Field(0.5, ge=0, le=1, description="share of weights set to zero")
    kind: Literal["wanda", "magnitude"] = "wanda"
    seeds: int = Field(5, json_schema_extra={"scope": "plan"})
    text: Annotated[str, Input()] = "wikipedia-articles"

    @field_validator("text")
    @classmethod
    def _exists(cls, text: str) -> str:
        if text.startswith("./"):
            raise InputError(f"{text} does not exist: give a text file")
        return text


TRIAL = Trial("pruning", Params, lambda params: (), presets={"smoke": {"seeds": 2}, "full": {"sparsity": 0.7}})


def test_values_override_the_preset_which_overrides_defaults():
    assert make_params(TRIAL, "full", {"seeds": 9}) == Params(sparsity=0.7, seeds=9)
    assert make_params(TRIAL) == Params()


def test_an_unknown_parameter_lists_the_valid_ones_and_suggests_the_nearest():
    with pytest.raises(UnknownNameError) as error:
        make_params(TRIAL, None, {"sparsty": 0.5})
    assert str(error.value) == (
        "there is no parameter of pruning 'sparsty'; did you mean 'sparsity'? Known: kind, seeds, sparsity, text"
    )


def test_an_unknown_preset_lists_the_valid_ones():
    with pytest.raises(UnknownNameError, match="no preset"):
        make_params(TRIAL, "fast")


def test_a_value_out_of_range_names_parameter_value_limit_and_meaning_in_one_line():
    with pytest.raises(InputError) as error:
        make_params(TRIAL, None, {"sparsity": 1.5, "kind": "ria"})
    message = str(error.value)
    assert "sparsity=1.5: input should be less than or equal to 1 (share of weights set to zero)" in message
    assert "kind='ria': input should be 'wanda' or 'magnitude'" in message
    assert "\n" not in message


def test_a_validators_own_error_keeps_its_words():
    with pytest.raises(InputError, match=r"^text: \./no\.txt does not exist: give a text file$"):
        make_params(TRIAL, None, {"text": "./no.txt"})


def test_settings_come_over_those_of_the_yaml_file(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("sparsity: 0.6\nkind: magnitude\n")
    assert parse_settings(["sparsity=0.7", "text="], file) == {"sparsity": 0.7, "kind": "magnitude", "text": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [("- a\n- b\n", "expected 'name: value' lines"), ("a: [", "not a YAML file"), (None, "cannot read")],
)
def test_a_bad_yaml_file_is_named(tmp_path, content, message):
    file = tmp_path / "p.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        parse_settings([], file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("setting", ["sparsity", "=3", " =3"])
def test_a_setting_without_name_or_value_is_refused(setting):
    with pytest.raises(InputError, match="name=value"):
        parse_settings([setting])


def test_plan_parameters_stay_out_of_the_key():
    assert key_of(Params(seeds=3)) == key_of(Params(seeds=8))
    assert key_of(Params(sparsity=0.1)) != key_of(Params())


def test_an_input_is_known_by_its_content_and_not_by_where_it_lies(tmp_path):
    here, there = tmp_path / "a.txt", tmp_path / "b.txt"
    for file in (here, there):
        file.write_text("the same")
    one, two = (Params(text=str(file)) for file in (here, there))
    assert key_of(one) == key_of(two)
    assert input_digests(one) == input_digests(two)
    there.write_text("another")
    assert input_digests(one) != input_digests(two)


def test_a_folder_is_digested_with_the_names_of_its_files(tmp_path):
    def digest(name: str, text: str) -> dict[str, str]:
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "x.txt").write_text(text)
        return input_digests(Params(text=str(folder)))

    first = digest("one", "text")
    assert digest("two", "text") == first
    assert digest("three", "other") != first
    Path(tmp_path / "two" / "sub" / "x.txt").rename(tmp_path / "two" / "sub" / "y.txt")
    assert input_digests(Params(text=str(tmp_path / "two"))) != first
