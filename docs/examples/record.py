"""Runs examples, and writes their outputs and plots beside this file, for their pages.

.venv/bin/python docs/examples/record.py [NAME ...]
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"


def main(names: list[str]) -> None:
    """Runs the named examples, or all."""
    for name in names or sorted(path.stem for path in EXAMPLES.glob("*.py")):
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(HERE)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
        (HERE / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
