"""Run example programs one after the other in this process: ``run_examples.py FOLDER PROGRAM ...``.

TensorFlow starts once for all of them. Prints one JSON object: what each program printed, by its path.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys


def main(folder: str, programs: list[str]) -> None:
    """Run every program as a script, with FOLDER as the argument of those that write files."""
    printed = {}
    for program in programs:
        sys.argv = [program, folder] if _writes_files(program) else [program]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(program, run_name="__main__")
        printed[program] = output.getvalue()
    print(json.dumps(printed))


def _writes_files(program: str) -> bool:
    with open(program, encoding="utf-8") as source:
        return "[FOLDER]" in source.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
