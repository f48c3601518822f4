"""Damage data at random: bits, bytes, pieces, and things that have kept readers busy or ended them before."""

from __future__ import annotations

import random
from collections.abc import Sequence

LONGEST = 40_000  # bytes of an input
_PIECES = (
    *(b"9" * n for n in (1, 30, 400, 5000)),
    *(text * n for text in (b"[", b"{", b" ", b'{"a":', b"- ", b"1", b"(", b"\\") for n in (1, 100, 10_000)),
    *(b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"1.5", b"null", b"true", b'""', b"[]", b"{}", b"-0", b"1e-999"),
    *(b"!!bool foo", b"!!int ''", b"!!timestamp x", b"&a ", b"*a", b"&a [*a, *a]", b"<<: *a", b"? ", b"|\n", b"--- "),
    *(
        rb"\ud800",
        rb"\u0000",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        "\u0663".encode(),
        "\u2028".encode(),
        b"\r",
        b"\n",
        b"\t",
    ),
    *(b"node1 -- ", b" -- ", b"forward_compute_time=", b"[1; 2]", b"K=", b":D=", b"0F0 ", b"; ", b"GB/s", b"us"),
    b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)),
)


def mutate(numbers: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the ``seeds`` after one to five random changes."""
    data = numbers.choice(seeds)
    for _ in range(numbers.choice((1, 1, 1, 2, 5))):
        data = _change(numbers, data, seeds)
    return data[:LONGEST]


def _change(numbers: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    begin = numbers.randrange(len(data) + 1)
    end = min(len(data), begin + numbers.choice((0, 1, 2, 8, 60)))
    match numbers.randrange(6):
        case 0 if begin < len(data):
            return data[:begin] + bytes([data[begin] ^ 1 << numbers.randrange(8)]) + data[begin + 1 :]
        case 1:
            return data[:begin] + data[end:]
        case 2:
            return data[:begin] + data[begin:end] * numbers.choice((2, 10, 1000)) + data[end:]
        case 3:
            other = numbers.choice(seeds)
            return data[:begin] + other[numbers.randrange(len(other) + 1) :]
        case 4:
            return data[:begin]
    return data[:begin] + numbers.choice(_PIECES) + data[end:]
