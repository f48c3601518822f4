"""Make signatures, docstrings, tables and command-line options from the fields of ``Options``."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from dapple_tf.autoplan.options import Options

_INDENT = 8 * " "  # of an argument in a docstring
_SIMILAR = 0.8  # of a name that a user may have meant: "optimizer" is another option than "shard_optimizer"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def make_options(caller: str, given: Mapping[str, Any]) -> Options:
    """Return the options that a call of the function ``caller`` gives; TypeError for a name that is no option."""
    known = [declared.name for declared in fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, _SIMILAR)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    return Options(**given)


def document_options(*left_out: str) -> Callable[[_Function], _Function]:
    """Return a decorator that shows the options of a function's ``**options`` in its signature and docstring.

    The line "{options}" of the docstring becomes the list of the options. ``left_out``: those that it does not take.
    """
    declared = [option for option in fields(Options) if option.name not in left_out]

    def document(function: _Function) -> _Function:
        known = inspect.signature(function)
        kinds = inspect.Parameter
        own = [one for one in known.parameters.values() if one.kind is not kinds.VAR_KEYWORD]
        added = [kinds(o.name, kinds.KEYWORD_ONLY, default=o.default, annotation=o.type) for o in declared]
        function.__signature__ = known.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        texts = [f"{o.name}: {o.metadata['meaning']} {o.metadata['more']}".rstrip() for o in declared]
        wrapper = textwrap.TextWrapper(
            120, initial_indent=_INDENT, subsequent_indent=_INDENT + 4 * " ", break_on_hyphens=False
        )
        listed = "\n".join(map(wrapper.fill, texts))
        function.__doc__ = (function.__doc__ or "").replace(f"{_INDENT}{{options}}", listed)
        return function

    return document


def options_table() -> str:
    """Return the options as a Markdown table: name, meaning with a link to the guide, default, command-line name."""
    rows = ["| option | meaning | default | command line |", "|---|---|---|---|"]
    for option in fields(Options):
        page = option.metadata["page"]
        link = f" [Guide](../guide/{page})" if page else ""
        flag = f"`{option.metadata['flag']}`" if option.metadata["flag"] else ""
        rows.append(f"| `{option.name}` | {option.metadata['meaning']}{link} | `{option.default!r}` | {flag} |")
    return "\n".join(rows)


def about_option(name: str) -> Mapping[str, Any]:
    """Return what is declared of an option: see ``_option``."""
    return Options.__dataclass_fields__[name].metadata
