"""Load a MODEL: ``path.py:callable`` or ``package.module:callable``, called with keyword options."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapple_tf.commands.workload import Workload
from dapple_tf.errors import ModelError


def load_model(model: str, settings: Sequence[str], batch_size: int | None, seed: int | None, **_: Any) -> Workload:
    """Return the Workload that a command's MODEL_OPTIONS name.

    Raises ModelError as ``load_workload`` does, and for ``--batch-size`` or ``--seed`` of a model without that option.
    """
    chosen = parse_options(settings)
    for key, value in (("batch_size", batch_size), ("seed", seed)):
        if value is not None:
            if not accepts(model, key):
                raise ModelError(f"{model} has no option {key}, so --{key.replace('_', '-')} cannot be given")
            chosen[key] = value
    return load_workload(model, chosen)


def load_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Call the MODEL ``name`` with ``options``, and return its Workload.

    Raises ModelError for a file, callable or option that does not exist, naming those that do, and for a callable that
    returns something else.
    """
    function = find_callable(name)
    accepted = inspect.signature(function).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    for key in options:
        if key not in accepted and not open_ended:
            near = difflib.get_close_matches(key, accepted, n=3) or list(accepted)
            raise ModelError(f"{name} has no option {key!r}; it has {', '.join(near) or 'none'}")
    for key, parameter in accepted.items():
        named = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if named and parameter.default is inspect.Parameter.empty and key not in options:
            raise ModelError(f"{name} needs the option {key!r}: give it with --set {key}=VALUE")
    workload = function(**options)
    if not isinstance(workload, Workload):
        raise ModelError(
            f"{name} returned a {type(workload).__name__}, not a dapple.Workload(loss_fn, optimizer, dataset)"
        )
    return workload


def accepts(name: str, option: str) -> bool:
    """Return whether the callable of the MODEL ``name`` takes the option."""
    parameters = inspect.signature(find_callable(name)).parameters
    return option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def find_callable(name: str) -> Callable[..., Any]:
    """Return the callable of the MODEL ``name``; raise ModelError where there is none."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ModelError(f"{name!r} is not a MODEL such as models/gpt.py:gpt or package.module:callable")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=3) or public[:6]
        raise ModelError(f"{place} has no callable {attribute!r}; it has {', '.join(near) or 'none'}")
    return found  # type: ignore[no-any-return]  # checked above


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    resolved = path.resolve()
    # A file inside a package is imported as part of it, so that it can import its neighbours.
    parts, folder = [resolved.stem], resolved.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _load_module(".".join(parts))
    if Path(module.__file__ or "").resolve() != resolved:
        raise ModelError(f"{path} has the name of another module, {module.__name__!r}: rename the file")
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(f"module {name!r} cannot be imported: {error}") from error


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``key=value`` pairs: values are Python literals, or else strings.

    Raises ModelError for a pair that is not of that form.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ModelError(f"--set {pair!r} is not of the form key=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options
