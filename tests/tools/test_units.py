"""Amounts of bytes: one way to read them, one way to write them, and what is written can be read."""

import pytest
import torch
from hypothesis import example, given, strategies as st

from remat import RematError, save_larger_than, scan_remat
from tests.tools.inside import check_budget, check_peak, format_bytes, parse_bytes


@given(st.integers(0, 2**52))
@example(1023)
@example(1024**2 - 1)
@example(1024**3 - 1)
@example(1024**4 - 1)
def test_what_is_written_can_be_read(count):
    text = format_bytes(count)
    back = parse_bytes(text)
    number, unit = text.split()
    # Rounded to the last digit that is shown, and never to a thousand of a smaller unit.
    assert abs(back - count) <= parse_bytes(f"1 {unit}") / 20 + 1
    assert float(number) < 1024 or unit == "TiB"
    assert format_bytes(back) == text or abs(back - count) < 1
    assert parse_bytes(text.replace(" ", "").lower()) == parse_bytes(text.removesuffix("B")) == back


@given(st.integers(0, 2**40), st.sampled_from(["", "K", "M", "G", "T"]), st.booleans())
def test_units(count, prefix, binary):
    unit = f"{prefix}{'i' * (binary and bool(prefix))}B"
    factor = (1024 if binary else 1000) ** " KMGT".index(prefix or " ")
    assert (
        parse_bytes(f"{count} {unit}") == parse_bytes(f"{count}{unit.lower()}") == int(float(count) * factor)
    )


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 QiB", "1.2.3", "0x10", "1e999", "two GB", "inf", "1 i"])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError, match="is not an amount of bytes: write 4096"):
        parse_bytes(text)
    with pytest.raises(RematError, match="is not a budget. Write budget=0.4"):
        check_budget(text)
    with pytest.raises(RematError, match="is not a peak. Write peak="):
        check_peak(text)
    with pytest.raises(TypeError, match="is not an amount of bytes"):
        save_larger_than(text)
    with pytest.raises(ValueError, match="write bytes as an int, or '64MiB'"):
        scan_remat(lambda h, _: (h, None), torch.ones(2), length=3, checkpoints="auto", budget=text)


def test_every_budget_reads_the_same_text():
    assert check_budget("1.5 KiB") == check_peak("1.5 KiB") == parse_bytes("1.5 KiB") == 1536
    assert save_larger_than("1.5 KiB") == save_larger_than(1536)
    run = [
        scan_remat(lambda h, _: (h.sin(), None), torch.ones(2), length=3, checkpoints="auto", budget=budget)
        for budget in ("1.5 KiB", 1536)
    ]
    assert torch.equal(run[0][0], run[1][0])
