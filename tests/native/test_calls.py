"""Calls as data, made by one call into C."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from engine import native
from engine.native.calls import MOST_ARGUMENTS
from tests.native import needs_compiler

pytestmark = needs_compiler

SOURCE = """
#include <cstdint>
extern "C" void add(int64_t* to, int64_t one, int32_t other) { *to += one + other; }
extern "C" void twice(int64_t* to) { *to *= 2; }
extern "C" void scale(double* to, float by) { *to *= by; }
extern "C" void sum(int64_t* to, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h,
                    int64_t i) { *to = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i; }
"""


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    source = tmp_path / "sums.cpp"
    source.write_text(SOURCE)
    pointer, int64 = native.POINTER, native.INT64
    return native.load(
        source,
        {
            "add": (pointer, int64, native.INT32),
            "twice": (pointer,),
            "scale": (pointer, native.FLOAT),
            "sum": (pointer, *[int64] * (MOST_ARGUMENTS - 1)),
        },
    )


def test_calls_are_made_in_order_whenever_the_list_runs(library: ctypes.CDLL) -> None:
    value = ctypes.c_int64(1)
    run = native.in_one([library.add.at(ctypes.addressof(value), 5, -3), library.twice.at(ctypes.addressof(value))])
    assert value.value == 1, "nothing is called yet"
    run()
    assert value.value == 6
    run()
    assert value.value == 16
    library.twice.at(ctypes.addressof(value))()
    assert value.value == 32


def test_every_argument_arrives(library: ctypes.CDLL) -> None:
    value = ctypes.c_int64()
    call = library.sum.at(ctypes.addressof(value), *range(1, MOST_ARGUMENTS))
    call()
    want, value.value = value.value, 0
    native.in_one([call])()
    assert value.value == want == sum(i * i for i in range(1, MOST_ARGUMENTS))


def test_a_call_that_a_list_cannot_hold_is_named(library: ctypes.CDLL) -> None:
    value = ctypes.c_double(2.0)
    call = library.scale.at(ctypes.addressof(value), 1.5)
    with pytest.raises(ValueError, match="scale takes arguments that are neither integers nor pointers"):
        native.in_one([call])
    with pytest.raises(ValueError, match="sum takes 11 arguments, expected at most 10"):
        native.in_one([library.sum.at(*range(MOST_ARGUMENTS + 1))])
