"""Run the cells of a notebook in order in this process: ``notebooks NOTEBOOK FOLDER [--write]``.

The cells run in FOLDER. The last line printed is a JSON list of what each cell of code printed; with ``--write`` the
notebook then holds it.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT


def main(notebook: Path, folder: Path, *, write: bool) -> None:
    """Run every cell of code in the same names, as Jupyter does."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # for the commands that cells start
    content = json.loads(notebook.read_text("utf-8"))
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # TensorFlow reads it
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(source, name, "exec"), names)
            printed.append(output.getvalue())
            cell["outputs"] = _stream(printed[-1])
    if write:
        notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(printed))


def _stream(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), write="--write" in sys.argv)
