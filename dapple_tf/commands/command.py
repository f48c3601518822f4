"""What all commands have: options in groups, --quiet and --verbose, former names of options, and shell completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from dapple_tf.commands.output import print_warning
from dapple_tf.messages import LOGGER

Decorator = Callable[..., Any]

FILE = click.Path()  # the shell completes names of files; each command says itself what is wrong with one


class Command(cloup.Command):
    """A command; ``former_names``: former names of its options, which still work, with a warning."""

    def __init__(self, *args: Any, former_names: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.former_names = former_names or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line, former names of options as the present ones."""
        return super().parse_args(ctx, [self._present_name(word) for word in args])

    def _present_name(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name not in self.former_names:
            return word
        print_warning(f"{name} is now {self.former_names[name]}; the old name will go in version 0.3")
        return f"{self.former_names[name]}{equals}{value}"


def command(**settings: Any) -> Decorator:
    """Return a decorator that makes a function a ``Command``; see ``click.command`` for ``settings``."""
    return cloup.command(cls=Command, **settings)


def result_options(*options: Decorator) -> Decorator:
    """Return the group of the options that say what is written and shown: those of the command, and those of all."""
    return cloup.option_group(
        "Results and messages",
        *options,
        cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout."),
        cloup.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_set_level(logging.WARNING),
            help="Show no progress: only results, warnings and errors.",
        ),
        cloup.option(
            "-v",
            "--verbose",
            is_flag=True,
            expose_value=False,
            callback=_set_level(logging.DEBUG),
            help="Show also the seconds of each part of a build, and what TensorFlow prints when it starts.",
        ),
    )


def _set_level(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
        if not given:
            return
        if ctx.meta.setdefault("dapple_tf.level", level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other: give one of them")
        LOGGER.setLevel(level)

    return set_level


class Completed(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.5 on
    """Text that the shell completes with ``words``, and where ``files`` is set with names of files.

    ``read``: returns what the text states; raises an error that says what is wrong with it.
    """

    def __init__(
        self, name: str, words: Sequence[str], read: Callable[[str], Any] | None = None, files: bool = True
    ) -> None:
        self.name, self.words, self.read, self.files = name, words, read, files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what ``read`` makes of the text."""
        return value if self.read is None or not isinstance(value, str) else self.read(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin so, or where none does the mark that asks the shell for files.

        After a comma the next word of a list begins. Words with spaces are not offered: a shell would part them.
        """
        before, comma, begun = incomplete.rpartition(",")
        words = [word for word in self.words if word.startswith(begun) and " " not in word]
        found = [CompletionItem(f"{before}{comma}{word}") for word in words]
        return found if found or not self.files else [CompletionItem(incomplete, type="file")]
