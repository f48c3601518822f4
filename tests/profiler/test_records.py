"""Objects of files are read into dataclasses; each kind of wrong value is refused, with the path of its field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from dapple_tf.profiler.records import Count, Figure, Name, read_record


class FileError(ValueError):
    """The error of the files of these tests."""


@dataclass(frozen=True)
class Part:
    """An object inside the file."""

    size: Figure
    word: Literal["red", "blue"] = "red"


@dataclass(frozen=True)
class Whole:
    """The top of the file, with a field of each kind."""

    count: Count
    name: Name = "none"
    figure: Figure = 0.0
    flag: bool = False
    parts: tuple[Part, ...] = ()
    pairs: tuple[tuple[Count, Count], ...] | None = None
    named: Mapping[str, Part] = field(default_factory=dict)
    free: Mapping[str, Any] | None = None
    quantity: Name | Figure | None = None
    either: Count | tuple[Part, ...] = 0

    def __post_init__(self) -> None:
        if self.count == 7:
            raise FileError("count is 7")


def read(**data: Any) -> Whole:
    return read_record({"count": 1, **data}, Whole, FileError)


def test_all_kinds_of_fields_are_read() -> None:
    found = read(
        name="n",
        figure=2,
        flag=True,
        parts=[{"size": 1, "word": "blue"}],
        pairs=[[0, 1]],
        named={"a b": {"size": 0.5}},
        free={"x": [1, None]},
        quantity="16GB",
        either=[{"size": 3}],
    )
    assert found == Whole(
        1,
        "n",
        2.0,
        flag=True,
        parts=(Part(1.0, "blue"),),
        pairs=((0, 1),),
        named={"a b": Part(0.5)},
        free={"x": [1, None]},
        quantity="16GB",
        either=(Part(3.0),),
    )
    assert isinstance(found.figure, float)


def test_an_optional_field_may_be_null_at_every_level() -> None:
    found = read(name=None, named=None, parts=[{"size": 1, "word": None}], either=[{"size": 1, "word": None}])
    assert found == Whole(1, parts=(Part(1.0),), either=(Part(1.0),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"coumt": 1}, "coumt is not a field of this file; did you mean 'count'?"),
        ({"x": 1}, "x is not a field of this file; there are count, name, figure"),
        ({1080: 1}, "1080 is not a field of this file; there are"),
        ({"parts": [{"size": 1, "sise": 1}]}, "parts[0].sise is not a field of this file; did you mean 'size'?"),
        ({"named": {"a": {"size": 1, "x": 1}}}, "named.a.x is not a field of this file; there are size, word"),
        ({"parts": [{}]}, "parts[0].size is missing"),
        ({"named": {"a": {}}}, "named.a.size is missing"),
        ({"count": None}, "count is None, not a whole number of at least 0"),
        ({"count": "1"}, "count is '1', not a whole number of at least 0"),
        ({"count": 1.0}, "count is 1.0, not a whole number of at least 0"),
        ({"count": True}, "count is True, not a whole number of at least 0"),
        ({"count": -1}, "count is -1, not a whole number of at least 0"),
        ({"count": 10**16}, "count is 10000000000000000, larger than is plausible (1e+15)"),
        ({"figure": "1"}, "figure is '1', not a finite number of at least 0"),
        ({"figure": True}, "figure is True, not a finite number of at least 0"),
        ({"figure": -0.5}, "figure is -0.5, not a finite number of at least 0"),
        ({"figure": math.nan}, "figure is nan, not a finite number of at least 0"),
        ({"figure": math.inf}, "figure is inf, not a finite number of at least 0"),
        ({"name": 1}, "name is 1, not a string"),
        ({"name": "n" * 2001}, "name has 2001 characters; at most 2000 are read"),
        ({"flag": 1}, "flag is 1, not true or false"),
        ({"parts": {}}, "parts is {}, not a list"),
        ({"parts": [{"size": 1}, 3]}, "parts[1] is 3, not an object"),
        ({"parts": [{"size": 1}, {"size": "x"}]}, "parts[1].size is 'x', not a finite number of at least 0"),
        ({"parts": [{"size": 1, "word": "green"}]}, "parts[0].word is 'green'; known are red, blue"),
        ({"parts": [{"size": 1, "word": 1}]}, "parts[0].word is 1, not a string"),
        ({"pairs": [[0, 1], [0, 1, 2]]}, "pairs[1] is [0, 1, 2], not a list of 2 values"),
        ({"pairs": [[0, -1]]}, "pairs[0][1] is -1, not a whole number of at least 0"),
        ({"named": ["a"]}, "named is ['a'], not an object"),
        ({"named": {"a": 1}}, "named.a is 1, not an object"),
        ({"named": {"a": {"size": 1}, "b": {"size": -1}}}, "named.b.size is -1, not a finite number of at least 0"),
        ({"named": {1080: {}}}, "named has the name 1080, which is not a string: write it in quotes"),
        ({"free": [1]}, "free is [1], not an object"),
        ({"quantity": True}, "quantity is True, not a finite number of at least 0, or a string"),
        ({"quantity": -1}, "quantity is -1, not a finite number of at least 0"),
        ({"either": "x"}, "either is 'x', not a whole number of at least 0, or a list"),
        ({"either": [1]}, "either[0] is 1, not an object"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(data: dict[Any, Any], message: str) -> None:
    with pytest.raises(FileError) as caught:
        read_record({"count": 1, **data}, Whole, FileError)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("field_name", ["figure", "quantity"])
def test_a_whole_number_larger_than_any_float_is_refused_in_a_short_message(field_name: str) -> None:
    with pytest.raises(FileError, match=rf"^{field_name} is 10*\.\.\.0*, not a finite number of at least 0$") as caught:
        read(**{field_name: 10**400})
    assert len(str(caught.value)) < 200


def test_an_error_of_the_class_itself_is_passed_on() -> None:
    with pytest.raises(FileError, match=r"^count is 7$"):
        read(count=7)


def test_the_format_is_checked_before_all_fields() -> None:
    def read_file(data: Any) -> Whole:
        return read_record(data, Whole, FileError, file_format="test/1")

    assert read_file({"format": "test/1", "count": 1}) == Whole(1)
    with pytest.raises(FileError, match=r"^format is 'test/2', not 'test/1'$"):
        read_file({"format": "test/2", "other": 1})
    with pytest.raises(FileError, match=r"^format is missing; it must be 'test/1'$"):
        read_file({"count": 1})
    with pytest.raises(FileError, match=r"^it holds \[1\], not an object with the field format, 'test/1'$"):
        read_file([1])


def test_the_path_of_an_object_inside_a_file_precedes_its_fields() -> None:
    with pytest.raises(FileError, match=r"^outer\[2\]\.size is 'x', not a finite number"):
        read_record({"size": "x"}, Part, FileError, "outer[2]")
    with pytest.raises(FileError, match=r"^outer\[2\] is 3, not an object"):
        read_record(3, Part, FileError, "outer[2]")
