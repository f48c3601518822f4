"""Hooks of mkdocs: write the pages that are generated from the code, so that they cannot differ from it.

``tutorials/*.md`` come from the notebooks beside them. ``architecture/ops.md`` comes from the op table,
``architecture/tensorflow_ops.md`` from the census of TensorFlow's ops (which loads TensorFlow),
``architecture/modules.md`` from the first line of every module, ``reference/cli.md`` from the commands,
``reference/options.md`` from the options of a pipeline, and ``reference/api.md`` lists the names of
``dapple_tf.__all__``: mkdocstrings puts their docstrings in place of the ``:::`` lines.
"""

from __future__ import annotations

import ast
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dapple_tf
from dapple_tf.autoplan.option_help import options_table
from dapple_tf.cli import cli
from dapple_tf.graph_passes.ir.ops import ops_table_markdown

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of the ``docs`` folder (a hook that mkdocs calls)."""
    from mkdocs.structure.files import File  # not at the top: the tests check links where mkdocs is not installed

    for path, make_page in generated_pages().items():
        files.append(File.generated(config, path, content=make_page()))
    return files


def generated_pages() -> dict[str, Callable[[], str]]:
    """Return the functions that make the Markdown of the generated pages, by the page's path inside ``docs``."""
    return {
        **{f"tutorials/{path.stem}.md": partial(tutorial_page, path) for path in TUTORIALS},
        "architecture/modules.md": modules_page,
        "architecture/ops.md": ops_page,
        "architecture/tensorflow_ops.md": tensorflow_ops_page,
        "reference/api.md": api_page,
        "reference/options.md": options_page,
        "reference/cli.md": command_line_page,
    }


def tutorial_page(path: Path) -> str:
    """Return a notebook as a page: its text, its code, and what each cell of code printed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(f"{text}\n")
        else:
            parts.append(f"```python\n{text}\n```\n")
            printed = "".join(line for output in cell["outputs"] for line in output["text"])
            if printed:
                parts.append(f'```text title="prints"\n{printed}```\n')
    title, *rest = parts
    heading, _, introduction = title.partition("\n")
    link = f"This page is a notebook: [download it]({path.name}). A test runs it and compares what it prints.\n"
    return "\n".join([heading, "", link, introduction.strip(), "", *rest])


def modules_page() -> str:
    """Return the page that lists every module of the package with the first line of its docstring."""
    parts = ["# Modules\n\nEvery file of the package, with the first line of its docstring.\n"]
    for package in ("dapple_tf", "graph_passes", "profiler"):
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            parts.append(f"## {folder.relative_to(ROOT)}\n\n| file | |\n|---|---|")
            for path in sorted(folder.glob("*.py")):
                line = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
                name = "(the folder)" if path.name == "__init__.py" else f"`{path.name}`"
                parts.append(f"| {name} | {_code_spans(line)} |")
            parts.append("")
    return "\n".join(parts)


def ops_page() -> str:
    """Return the page of the op table."""
    return f"""# Operations of the pipelined graph

Every node of a [pipelined graph](ir.md#the-call-level) has one of these operations. `verify` in
`graph_passes/ir/verify.py` checks each node against this table, which is defined in `graph_passes/ir/ops.py`.

{ops_table_markdown()}
"""


def tensorflow_ops_page() -> str:
    """Return the page of the ops of the installed TensorFlow, by how the analysis decides about them."""
    from benchmarks.census import census_markdown  # not at the top: it loads TensorFlow

    return f"""# TensorFlow's operations

How the [analysis of a loss](../guide/exactness.md) decides what an operation of TensorFlow does with samples, for every
operation of the installed TensorFlow. The rules are in `dapple_tf/frontend/dependence`, the classes in
`benchmarks/census.py`; a test fails where an operation of a newer TensorFlow has none.

{census_markdown()}
"""


# What attributes and functions of the API return, whose classes ``import dapple_tf as dapple`` does not give.
RETURNED = {
    "step.recording": "dapple_tf.timeline.recording.Recording",
    "step.report": "dapple_tf.memory.report.Report",
    "step.exactness": "dapple_tf.exactness.Exactness",
    "dapple.compare": "dapple_tf.planner.compare.Comparison",
}


def api_page() -> str:
    """Return the page of everything that ``import dapple_tf as dapple`` gives, and of what that returns."""
    parts = ["# Python API\n\nEverything that `import dapple_tf as dapple` gives, from its docstrings.\n"]
    for name in dapple_tf.__all__:
        is_module = name in dapple_tf._MODULES
        home = f"dapple_tf.{name}" if is_module else f"{dapple_tf._HOMES[name]}.{name}"
        parts.append(_docstrings(home, f"dapple.{name}", label=name, level=2))
    parts.append("## What these return\n\nObjects that the names above return. There is no need to import them.\n")
    for source, home in RETURNED.items():
        name = f"{home.rpartition('.')[2]}, from {source}"
        parts.append(_docstrings(home, name, label=name, level=3))
    return "\n".join(parts)


def _docstrings(home: str, heading: str, *, label: str, level: int) -> str:
    """Return the lines in place of which mkdocstrings puts the docstrings of an object; ``label`` is for the menu."""
    options = {"heading": heading, "heading_level": level, "toc_label": label}
    lines = [f"::: {home}", "    options:", *(f"      {name}: {value}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Return the page of the options that ``dapple.pipeline`` and its relatives take."""
    return f"""# Options of a pipeline

`dapple.pipeline`, `dapple.keras.pipeline` and `dapple.verify` take them by name. Windows (`mode="async"`) are not for
`dapple.verify`.

{options_table()}
"""


def command_line_page() -> str:
    """Return the page of the help texts of all commands."""
    width = {"max_content_width": 90, "terminal_width": 90}  # as wide as the site shows without scrolling
    context = click.Context(cli, info_name="dapple", **cli.context_settings, **width)
    parts = [
        "# Command line\n",
        "`dapple` is also `python -m dapple_tf`. Results go to stdout, progress and logs to stderr. With `--json` the "
        "last line of stdout is one JSON object. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.\n",
        "The shell completes commands, options, planners, schedules and files after "
        '`eval "$(_DAPPLE_COMPLETE=bash_source dapple)"` (`zsh_source`, `fish_source`).\n',
        _console("dapple --help", cli.get_help(context)),
    ]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None and not command.hidden:
            inner = command.context_class(command, info_name=name, parent=context, **width)
            parts += [f"## dapple {name}\n", _console(f"dapple {name} --help", command.get_help(inner))]
    return "\n".join(parts)


def _code_spans(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _console(command: str, text: str) -> str:
    return f"```text\n$ {command}\n{text}\n```\n"
