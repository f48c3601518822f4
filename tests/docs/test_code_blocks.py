"""Code in the pages is code: Python compiles, YAML loads, included files exist, commands take their options."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import yaml

from dapple_tf.cli import cli
from dapple_tf.profiler.cluster import Cluster
from tests.docs.pages import Page, written
from tests.paths import ROOT

PAGES = list(written().values())
CONTEXT = click.Context(cli)
COMMANDS = {name: command for name in cli.list_commands(CONTEXT) if (command := cli.get_command(CONTEXT, name))}


def ids(page: Page) -> str:
    return page.path


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_blocks_compile(page: Page) -> None:
    for block in page.blocks:
        if block.language == "python":
            compile(block.included, page.path, "exec")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_yaml_blocks_load(page: Page) -> None:
    for block in page.blocks:
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.included), dict)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_have_the_options_that_are_shown(page: Page) -> None:
    unknown = []
    for name, *words in _commands(page):
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"-h", "--help"}
        unknown += [f"{name} {word}" for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    assert not unknown


def test_the_guide_shows_every_command() -> None:
    shown = {words[0] for page in PAGES for words in _commands(page)}
    assert shown == {name for name, command in COMMANDS.items() if not command.hidden}


def test_the_example_cluster_is_one() -> None:
    assert Cluster.load(ROOT / "examples" / "cluster.yaml").devices == 16


def _commands(page: Page) -> list[list[str]]:
    """The words of every ``dapple`` command in a block or a code span; what is only a command's name counts too."""
    lines = [line for block in page.blocks if block.language in ("", "text", "bash") for line in _lines(block.text)]
    found = []
    for text in [*lines, *page.spans]:
        match = re.match(r"(?:\$ )?(?:mpirun .*?)?(?:\.venv/bin/)?dapple ([a-z].*)", text.strip())
        if match:
            words = shlex.split(match[1], comments=True)
            if "--" in words:  # the command that dapple launch starts
                rest = words[words.index("--") + 1 :]
                found += [rest[1:]] if rest[0] == "dapple" else []
                words = words[: words.index("--")]
            if words[0] in COMMANDS or len(words) > 1:
                found.append(words)
    return found


def _lines(text: str) -> list[str]:
    return re.sub(r"\\\n\s*", "", text).splitlines()
