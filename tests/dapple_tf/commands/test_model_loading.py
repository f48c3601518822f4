"""MODEL on the command line: files, modules, callables and options, and the messages where one is missing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.commands.model_loading import accepts, check_model_exists, find_callable, load_workload, parse_options
from dapple_tf.commands.workload import Workload
from dapple_tf.errors import ModelError
from tests.paths import ROOT
from tests.processes import run_python

SOURCE = """
import dapple_tf as dapple

constant = 3

def make(width=2, seed=0):
    return dapple.Workload(lambda x: x, None, [width, seed])

def needy(path, width=2):
    return dapple.Workload(None, None, [path])

def free(**options):
    return dapple.Workload(None, None, [options])

def wrong():
    return 3
"""

numbers = itertools.count()


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / f"a_model_{next(numbers)}.py"
    path.write_text(SOURCE)
    return path


def test_a_callable_of_a_file_gets_its_options(file: Path) -> None:
    workload = load_workload(f"{file}:make", {"width": 5})
    assert isinstance(workload, Workload)
    assert workload.dataset == [5, 0]
    assert load_workload(f"{file}:free", {"anything": 1}).dataset == [{"anything": 1}]


def test_a_callable_of_a_module() -> None:
    assert find_callable("json:dumps")([1]) == "[1]"


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour.py").write_text("value = 7")
    (tmp_path / "a_model_beside.py").write_text("from a_neighbour import value\ndef make(): return value")
    assert find_callable(f"{tmp_path / 'a_model_beside.py'}:make")() == 7


def test_a_file_of_a_package_is_imported_as_part_of_it(tmp_path: Path) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 8")
    (package / "model.py").write_text("from .part import value\ndef make(): return value")
    assert find_callable(f"{package / 'model.py'}:make")() == 8


def test_a_file_is_executed_once(tmp_path: Path) -> None:
    file = tmp_path / "a_model_that_counts.py"
    file.write_text("import sys\nsys.path.append('ran')\ndef make(): pass")
    find_callable(f"{file}:make")
    assert accepts(f"{file}:make", "width") is False
    assert sys.path.count("ran") == 1


@pytest.mark.parametrize(("option", "expected"), [("seed", True), ("batch_size", False)])
def test_whether_a_callable_has_an_option(file: Path, option: str, expected: bool) -> None:
    assert accepts(f"{file}:make", option) is expected
    assert accepts(f"{file}:free", option)


@pytest.mark.parametrize(
    ("callable_", "options", "message"),
    [
        (":mak", {}, "has no callable 'mak'; it has make"),
        (":constant", {}, "has no callable 'constant'; it has make, needy, free, wrong"),
        (":make", {"widht": 3}, "has no option 'widht'; it has width"),
        (":make", {"zzz": 3}, "has no option 'zzz'; it has width, seed"),
        (":wrong", {"a": 1}, "has no option 'a'; it has none"),
        (":needy", {"width": 3}, "needs the option 'path': give it with --set path=VALUE"),
        (":wrong", {}, r"returned a int, not a dapple.Workload\(loss_fn, optimizer, dataset\)"),
    ],
)
def test_a_wrong_callable_or_option_is_refused(
    file: Path, callable_: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_workload(f"{file}{callable_}", options)


def test_a_module_without_callables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "an_empty_model.py").write_text("")
    with pytest.raises(ModelError, match="has no callable 'make'; it has none"):
        find_callable(f"{tmp_path / 'an_empty_model.py'}:make")


@pytest.mark.parametrize("name", ["", "make", ":make", "model.py:", "model.py"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(
        ModelError, match=f"{name!r} is not a MODEL such as models/gpt.py:gpt or package.module:callable"
    ):
        find_callable(name)


@pytest.mark.parametrize("name", ["absent.py:make", "dapple_tf:make.py:make"])
def test_a_missing_file_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"there is no file {name.rpartition(':')[0]}"):
        find_callable(name)


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(
        ModelError, match="module 'no_such_module' cannot be imported: No module named 'no_such_module'"
    ):
        find_callable("no_such_module:make")


def test_a_file_that_imports_a_missing_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a_needy_model.py").write_text("import no_such_module")
    with pytest.raises(ModelError, match="module 'a_needy_model' cannot be imported: No module named 'no_such_module'"):
        find_callable(f"{tmp_path / 'a_needy_model.py'}:make")


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(SOURCE)
    with pytest.raises(ModelError, match=r"json.py has the name of another module, 'json': rename the file"):
        find_callable(f"{tmp_path / 'json.py'}:make")


def test_options_are_python_literals_or_strings() -> None:
    pairs = ["a=1", "b=2.5", "c=True", "d=(1, 2)", "e=plain text", "f=", "g=x=y", "h='1'", "i=None"]
    assert parse_options(pairs) == {
        "a": 1, "b": 2.5, "c": True, "d": (1, 2), "e": "plain text", "f": "", "g": "x=y", "h": "1", "i": None,
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["", "width", "=3", "a b=3", "a.b=3"])
def test_an_option_of_another_form_is_refused(pair: str) -> None:
    with pytest.raises(ModelError, match=f"--set {pair!r} is not of the form key=value"):
        parse_options([pair])


def test_a_model_that_is_surely_not_there_is_refused_unread(file: Path) -> None:
    check_model_exists(f"{file}:make")
    check_model_exists(f"{file}:constant")  # loading it tells that it is not callable
    check_model_exists("tests.dapple_tf.commands.tiny_model:tiny")
    check_model_exists("importlib.machinery:PathFinder")  # made by other means than a definition
    assert file.stem not in sys.modules
    with pytest.raises(ModelError, match=f"there is no file {file.parent}/{file.stem}s.py; did you mean {file}"):
        check_model_exists(f"{file.parent}/{file.stem}s.py:make")
    with pytest.raises(ModelError, match=r"there is no file no/such\.py$"):
        check_model_exists("no/such.py:make")
    with pytest.raises(ModelError, match="has no callable 'maek'; it has make"):
        check_model_exists(f"{file}:maek")
    with pytest.raises(ModelError, match=r"module 'nowhere.models' cannot be imported: there is no module 'nowhere'"):
        check_model_exists("nowhere.models:make")
    with pytest.raises(ModelError, match=r"tests\.dapple_tf\.commands\.tiny_model has no callable 'tine'; it has tiny"):
        check_model_exists("tests.dapple_tf.commands.tiny_model:tine")
    with pytest.raises(ModelError, match=r"dapple_tf\.examples has no callable 'gtp'; it has gpt"):
        check_model_exists("dapple_tf.examples:gtp")
    with pytest.raises(ModelError, match="is not a MODEL such as"):
        check_model_exists("models/gpt")


def test_a_file_without_a_callable_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ModelError, match=r"models/gpt\.py is a file: name the callable too, .*:NAME; it has gpt"):
        check_model_exists(str(ROOT / "models" / "gpt.py"))


def test_names_that_a_file_imports_or_makes_otherwise_may_be_there(file: Path) -> None:
    for source in ("from elsewhere import *", "if True:\n    late = print", "from os import getcwd as late", "def ("):
        file.write_text(source)
        check_model_exists(f"{file}:late")


def test_a_mistyped_model_is_refused_before_tensorflow_starts() -> None:
    program = """
import sys
from dapple_tf.cli import main

for command, *options in (["train"], ["verify"], ["profile", "-o", "p.json"]):
    sys.argv = ["dapple", command, "models/gtp.py:gpt", *options]
    try:
        main()
    except SystemExit as end:
        print(command, end.code, "tensorflow" in sys.modules)
"""
    run = run_python("-c", program)
    assert run.stdout.splitlines() == ["train 2 False", "verify 2 False", "profile 2 False"]
    assert run.stderr.count("there is no file models/gtp.py; did you mean models/gpt.py") == 3
