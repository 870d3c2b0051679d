"""Properties: what is written is read back exactly, and nothing else is read."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from attnforge import CertificateError
from attnforge.verification import Atom, Property, parse
from attnforge.verification.property import MOST_TEXT, decimal

GOOD = Property(
    (0.1, -2.0), (0.1, 3e-7), 3,
    ((Atom(0, True, 1e-30), Atom(1, False, -0.75)), (Atom(2, True, other=0),)),
)  # fmt: skip


def test_numbers_are_written_exactly() -> None:
    rng = np.random.default_rng(0)
    for x in [*(rng.normal(size=50) * 10.0 ** rng.integers(-300, 300, 50)), 5e-324, 1.7976931348623157e308, -0.0, 1.0]:
        assert Fraction(Decimal(decimal(float(x)))) == Fraction(float(x))
        assert "e" not in decimal(float(x)).lower() and "." in decimal(float(x))
    assert decimal(-0.0) == "0.0"


def test_properties_come_back() -> None:
    alone = Property((0.0,), (1.0,), 2, ((Atom(0, True, 0.5), Atom(1, False, 0.25)),))
    for given in (GOOD, alone):
        assert parse("; said before\n" + given.text()) == given
        assert given.text2("float32").count("(") == given.text2("float32").count(")")
    assert "(and (>= Y[0,2] Y[0,0]))" not in GOOD.text2("float32")  # an `and` of one part is no text of 2.0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(assert (>= X_1 -2.0))", ""),  # an end is missing
        ("(assert (>= X_1 -2.0))", "(assert (>= X_1 -2.0))\n(assert (>= X_1 -1.0))"),
        ("-2.0", "-2.05"),  # no number of float64: what would be read is not what is written
        ("-2.0", "-2e0"),
        ("-2.0", "nan"),
        ("-2.0", "7.0"),  # the lower end is above the upper one
        ("Real", "Int"),
        ("X_1 Real", "X_2 Real"),
        ("Y_2", "Y_3"),
        ("(and (>= Y_2 Y_0))", "(or (>= Y_2 Y_0))"),
        ("(and (>= Y_2 Y_0))", "(and (> Y_2 Y_0))"),
        ("(and (>= Y_2 Y_0))", "(and (>= X_0 Y_0))"),
        ("(assert (or", "(assert (and"),
        ("))\n", ")\n"),
        ("(declare-const X_0 Real)", "(declare-const X_0 Real)(check-sat)"),
        ("(declare-const X_0 Real)", "(((((((((((((())))))))))))))"),
        ("(declare-const X_0 Real)", "()"),
    ],
)
def test_other_texts_are_refused(old: str, new: str) -> None:
    text = GOOD.text()
    assert old in text
    with pytest.raises(CertificateError):
        parse(text.replace(old, new, 1))


def test_long_texts_and_endless_numbers_are_refused() -> None:
    with pytest.raises(CertificateError, match="characters"):
        parse("(" * (MOST_TEXT + 1))
    with pytest.raises(CertificateError):
        parse("")
    with pytest.raises(CertificateError, match="finite"):
        Property((0.0,), (math.inf,), 1, ((Atom(0, True),),))
    with pytest.raises(CertificateError, match="outputs"):
        Property((0.0,), (1.0,), 1, ((Atom(1, True),),))
    with pytest.raises(CertificateError, match="conditions"):
        Property((0.0,), (1.0,), 1, ((),))
