"""What packages export lazily: a module that is called like a name would hide it once it is imported."""

import importlib
import pkgutil

import pytest

import fairtrial

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(fairtrial.__path__, "fairtrial.")
    if module.ispkg and not module.name.startswith(("fairtrial.cli", "fairtrial.report"))
]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_exported_name_is_that_of_a_module(name):
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(getattr(package, "__all__", ()))
