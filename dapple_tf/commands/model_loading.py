"""Load a MODEL: ``path.py:callable`` or ``package.module:callable``, called with keyword options."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dapple_tf.commands.output import showing
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
    with showing(f"loads {model}"):
        return load_workload(model, chosen)


def load_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Call the MODEL ``name`` with ``options``, and return its Workload.

    Raises ModelError for a file, callable or option that does not exist, naming those that do, and for a callable that
    returns something else.
    """
    function = find_callable(name)
    accepted = inspect.signature(function).parameters
    for key in options:
        if not accepts(name, key):
            near = difflib.get_close_matches(key, accepted, n=3) or list(accepted)
            raise ModelError(f"{name} has no option {key!r}; it has {', '.join(near) or 'none'}")
    for key, parameter in accepted.items():
        named = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if named and parameter.default is inspect.Parameter.empty and key not in options:
            raise ModelError(f"{name} needs the option {key!r}: give it with --set {key}=VALUE")
    from dapple_tf.devices import deferred_on_host  # not at the top: it starts TensorFlow

    with deferred_on_host():  # the model may be larger than this process
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


def check_model_exists(name: str) -> None:
    """Raise ModelError for a MODEL that is surely not there, without importing anything.

    Importing a model starts TensorFlow, which takes seconds: a mistyped name is found before.
    """
    alone = name.endswith(".py") and os.path.isfile(name)  # without a callable
    place, attribute = (name, "") if alone else _split(name)
    if not place.endswith(".py"):
        package = place.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"module {place!r} cannot be imported: there is no module {package!r}")
        source = _find_source(place)
        if source is None:  # importing it tells more
            return
        path = source
    else:
        path = Path(place)
    if not path.is_file():
        raise ModelError(f"there is no file {path}{_near_files(path)}")
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError):  # importing it tells more
        return
    if alone:
        names = ", ".join(_functions(tree)[:6]) or "none at its top level"
        raise ModelError(f"{place} is a file: name the callable too, as in {place}:NAME; it has {names}")
    defined = _defined_names(tree)
    if defined.isdisjoint({"*", "__getattr__", attribute}):
        raise _lacks_callable(place, attribute, [*_functions(tree), *_imported_names(tree)])


def _near_files(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {', '.join(str(folder / name) for name in near)}?" if near else ""


def _find_source(module: str) -> Path | None:
    """Return the file of a module, without importing its packages; None where it is not an ordinary file."""
    names = module.split(".")
    spec = importlib.util.find_spec(names[0])
    for end in range(2, len(names) + 1):
        if spec is None:
            return None
        spec = PathFinder.find_spec(".".join(names[:end]), spec.submodule_search_locations)
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _imported_names(tree: ast.Module) -> list[str]:
    """Return the names of a package's ``__init__.py`` that it imports from its modules."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return [alias.asname or alias.name for node in imports for alias in node.names]


def _functions(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _defined_names(tree: ast.Module) -> set[str]:
    """Return every name that the file may define, wherever; "*" where it may have names that it does not tell."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec"):
            found.add("*")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _split(name: str) -> tuple[str, str]:
    """Return the place and the attribute of a MODEL; raise ModelError for a name of another form."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ModelError(f"{name!r} is not a MODEL such as models/gpt.py:gpt or package.module:callable")
    return place, attribute


def find_callable(name: str) -> Callable[..., Any]:
    """Return the callable of the MODEL ``name``; raise ModelError where there is none."""
    place, attribute = _split(name)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise _lacks_callable(place, attribute, public)
    return found  # type: ignore[no-any-return]  # checked above


def _lacks_callable(place: str, attribute: str, known: list[str]) -> ModelError:
    near = difflib.get_close_matches(attribute, known, n=3) or known[:6]
    return ModelError(f"{place} has no callable {attribute!r}; it has {', '.join(near) or 'none'}")


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
