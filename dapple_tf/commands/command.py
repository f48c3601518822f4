"""Define what all commands share: --json, --quiet and --verbose, renamed options, and shell completion."""

from __future__ import annotations

import itertools
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from dapple_tf.commands.output import print_warning
from dapple_tf.messages import LOGGER

Decorator = Callable[..., Any]

FILE = click.Path()  # for completion only: each command checks its files itself


class Command(cloup.Command):
    """A command. ``former_names`` maps old names of its options, which still work with a warning, to the new ones.

    ``explain_unknown`` returns what to do where an option, by its name, does not exist; "" if it knows nothing.
    """

    def __init__(
        self,
        *args: Any,
        former_names: Mapping[str, str] | None = None,
        explain_unknown: Callable[[str], str] = lambda name: "",
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.former_names = former_names or {}
        self.explain_unknown = explain_unknown

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line, after replacing old names of options by the new ones.

        Raises UsageError where an option whose value may be left out took the argument that is missing, and for an
        unknown option.
        """
        words = [self._present_name(word) for word in args]
        try:
            return super().parse_args(ctx, list(words))
        except click.MissingParameter as error:
            if isinstance(error.param, click.Argument):
                self._check_taken(words, error.param, ctx)
            raise
        except click.NoSuchOption as error:
            if advice := self.explain_unknown(error.option_name):
                raise click.UsageError(f"{error.format_message()} {advice}", ctx) from error
            raise

    def _check_taken(self, words: Sequence[str], missing: click.Argument, ctx: click.Context) -> None:
        """Raise UsageError where the ``missing`` argument was taken as the value of an option that may have one."""
        may_have_value = {
            name: option.flag_value
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag and isinstance(option.flag_value, str)
            for name in option.opts
        }
        for name, value in itertools.pairwise(words):
            if name in may_have_value and not value.startswith("-"):
                argument, usual = missing.make_metavar(ctx), may_have_value[name]
                raise click.UsageError(
                    f"{name} took {value} as its value, so that {argument} is missing: give {argument} first, or write "
                    f"{name}={usual} {value}",
                    ctx,
                )

    def _present_name(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name not in self.former_names:
            return word
        print_warning(f"{name} is now {self.former_names[name]}; the old name will go in version 0.3")
        return f"{self.former_names[name]}{equals}{value}"


def describe_own_command() -> str:
    """Return the command line of this process, as a user would write it again."""
    return f"{click.get_current_context().find_root().info_name} {shlex.join(sys.argv[1:])}"


def command(**settings: Any) -> Decorator:
    """Return a decorator that makes a function a ``Command``; see ``click.command`` for ``settings``."""
    return cloup.command(cls=Command, **settings)


def result_options(*options: Decorator) -> Decorator:
    """Return the group of output options: the given ones of the command, then --json, --quiet and --verbose."""
    return cloup.option_group(
        "Results and messages",
        *options,
        cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout."),
        _level_option("-q", "--quiet", logging.WARNING, "Show no progress: only results, warnings and errors."),
        _level_option(
            "-v",
            "--verbose",
            logging.DEBUG,
            "Show also the seconds of each part of a build, and what TensorFlow prints when it starts.",
        ),
    )


def _level_option(short: str, name: str, level: int, meaning: str) -> Decorator:
    """Return an option that sets the level of the package's logger."""

    def set_level(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
        if not given:
            return
        if ctx.meta.setdefault("dapple_tf.level", level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other: give one of them")
        LOGGER.setLevel(level)

    return cloup.option(short, name, is_flag=True, expose_value=False, callback=set_level, help=meaning)


class Completed(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.5 on
    """A type of text, for which the shell offers ``words`` and, if ``files`` is set, names of files.

    ``read`` converts the text, and raises an error that says what is wrong with it.
    """

    def __init__(
        self, name: str, words: Sequence[str], read: Callable[[str], Any] | None = None, files: bool = True
    ) -> None:
        self.name, self.words, self.read, self.files = name, words, read, files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what ``read`` makes of the text."""
        return value if self.read is None or not isinstance(value, str) else self.read(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that start with ``incomplete``; if there are none, ask the shell to complete file names.

        In a list, only the text after the last comma is completed. Words with spaces are not offered: a shell would
        split them.
        """
        before, comma, begun = incomplete.rpartition(",")
        words = [word for word in self.words if word.startswith(begun) and " " not in word]
        found = [CompletionItem(f"{before}{comma}{word}") for word in words]
        return found if found or not self.files else [CompletionItem(incomplete, type="file")]
