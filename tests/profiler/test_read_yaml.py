"""YAML as plain data: what a few lines could make of tags, aliases and nesting is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.profiler.read_files import LONGEST_YAML, load_yaml
from tests.quick import at_most

# Each level holds the one before ten times: 10^9 values in a few hundred bytes.
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 6: with aliases written out, more than 100000 values"),
        (MERGES, "with aliases written out, more than 100000 values"),
        ("a: &a [1, *a]", r"line 1: the alias \*'a' is inside the value that it stands for"),
        ("a: &a {b: {c: *a}}", "is inside the value that it stands for"),
        ("a: *b", "found undefined alias"),
        ("!!bool foo", "line 1: the tag 'tag:yaml.org,2002:bool': tags are not read, only plain values"),
        ("a: 1\nb: !!int ''", "line 2: the tag .*int'"),
        ("!!timestamp x", "the tag .*timestamp'"),
        ("!!omap [1]", "the tag .*omap'"),
        ("! a", "the tag '!'"),
        ("[" * 40 + "]" * 40, "line 1: lists and objects are nested in more than 32 levels"),
        ("[" * 250_000, "nested in more than 32 levels"),
        ("- " * 100_000, "nested in more than 32 levels"),
        ("a: '" + "x" * 2001 + "'", "line 1: a value of 2001 characters; at most 2000 are read"),
        ("a: 0x" + "f" * 5000, "a value of 5002 characters"),
        ("1:" * 900 + "1.5", "too large"),
        ("2001-13-45", "month must be in 1..12"),
        ("a: 1\na: 2", "line 2: the field 'a' is given twice in one object"),
        ("{[1]: 2}", "unhashable key"),
        ("a: =", "could not determine a constructor"),
        ("a\0b", "special characters are not allowed"),
        ("", "it is empty"),
        ('a: 1\nb: ["\\ud800x"]', r"line 2: '\\ud800x' is not Unicode text: it has half of a surrogate pair"),
        ('"\\udfff": 1', "line 1: .* it has half of a surrogate pair"),
    ],
)
def test_what_is_no_plain_data_is_refused_at_once(text: str, message: str) -> None:
    assert len(text) < LONGEST_YAML
    with at_most(2), pytest.raises(ValueError, match=message):
        load_yaml(text)


def test_plain_data_and_aliases_are_read() -> None:
    text = "base: &link {bandwidth: 25Gbps, latency: 5us}\nlinks: [*link, {<<: *link, latency: 0x10}]\nnone: ~\n"
    link = {"bandwidth": "25Gbps", "latency": "5us"}
    assert load_yaml(text) == {"base": link, "links": [link, {**link, "latency": 16}], "none": None}


@given(st.text(st.sampled_from("abc&*!<>:{}[],-?|'\"# \n\t0.~%="), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        load_yaml(text)
