import subprocess
import sys


def modules_after(statement):
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_stats_loads_numpy_and_scipy_special_only():
    loaded = modules_after("import fairtrial.stats")
    assert "scipy.special" in loaded
    assert not loaded & {"scipy.stats", "scipy.sparse", "scipy.linalg", "pandas", "torch", "sklearn", "pydantic"}


def test_fairtrial_itself_does_not_load_stats():
    assert not modules_after("import fairtrial") & {"fairtrial.stats", "numpy"}
