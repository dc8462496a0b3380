"""Run every benchmark, one after another, and print their tables: ``make bench``.

``python benchmarks/run.py engine lm/pruning`` runs only those whose path begins so.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    wanted = tuple(sys.argv[1:])
    failed = []
    for script in sorted(HERE.glob("*/**/*.py")):
        name = script.relative_to(HERE).with_suffix("").as_posix()
        if wanted and not name.startswith(wanted):
            continue
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, str(script)], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
