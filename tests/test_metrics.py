"""Rates of acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.metrics import unconditional_to_conditional_rates

RATE = st.floats(0, 1)


def test_u3_the_table() -> None:
    assert unconditional_to_conditional_rates([0.8, 0.4, 0.4, 0, 0.1]) == (0.8, 0.5, 1.0, 0.0, 0.0)
    assert unconditional_to_conditional_rates([]) == ()
    assert unconditional_to_conditional_rates([1, 1]) == (1.0, 1.0)


def test_d28_rates_that_rise_are_cut_to_always() -> None:
    assert unconditional_to_conditional_rates([0.5, 0.8]) == (0.5, 1.0)


@given(st.lists(RATE).map(lambda rates: sorted(rates, reverse=True)))
def test_products_give_the_rates_back(rates: list[float]) -> None:
    product = 1.0
    for rate, conditional in zip(rates, unconditional_to_conditional_rates(rates), strict=True):
        product *= conditional
        assert product == pytest.approx(rate, rel=1e-12, abs=1e-300)


@given(st.lists(RATE))
def test_every_conditional_rate_is_a_rate(rates: list[float]) -> None:
    assert all(0 <= conditional <= 1 for conditional in unconditional_to_conditional_rates(rates))


@pytest.mark.parametrize("rates", [[1.2], [0.5, -0.1], [0.5, float("nan")], [float("inf")]])
def test_what_is_no_rate_is_refused(rates: list[float]) -> None:
    with pytest.raises(ArgumentError, match="rates: expected numbers from 0 to 1"):
        unconditional_to_conditional_rates(rates)
