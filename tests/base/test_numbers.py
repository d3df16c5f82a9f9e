from __future__ import annotations

import pytest

from stretto.base import numbers


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.si(0), "0"),
        (numbers.si(999), "999"),
        (numbers.si(999_600), "1.00M"),
        (numbers.si(9_996), "10.0k"),
        (numbers.si(20_000), "20.0k"),
        (numbers.si(1.5e15, "FLOPs"), "1.50 PFLOPs"),
        (numbers.params(1_234_000_000), "1.23B"),
        (numbers.trimmed("20.0k"), "20k"),
        (numbers.trimmed("1.50 GFLOPs"), "1.5 GFLOPs"),
        (numbers.trimmed("100"), "100"),
        (numbers.percent(0.339), "34 %"),
        (numbers.percent(0.0449), "4.5 %"),
        (numbers.difference(-0.0031), "−0.003"),
        (numbers.difference(-0.0001), "±0.000"),
        (numbers.loss(-0.0001), "0.000"),
        (numbers.loss(-0.0123), "−0.012"),
        (numbers.size_in_bytes(1536), "1.5 KiB"),
        (numbers.size_in_bytes(999), "999 B"),
        (numbers.size_in_bytes(999.96 * 1024), "0.977 MiB"),
        (numbers.duration(0.9994), "999 ms"),
        (numbers.duration(0.9999), "1.0 s"),
        (numbers.duration(59.96), "1 min 00 s"),
        (numbers.duration(12_000), "3 h 20 min"),
        (numbers.counted(1, "size"), "1 size"),
        (numbers.listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected


def test_tiny_numbers_keep_their_power_and_zero_is_exact() -> None:
    assert [numbers.short(value) for value in (0.0, 2.84e-12, 0.0421, 1.0, -8.5e-4)] == [
        "0",
        "2.8e−12",
        "0.0421",
        "1",
        "−8.5e−4",
    ]
    assert numbers.short(12_345.6) == "12,346"
    assert numbers.short(2.31415, digits=4) == "2.314"


def test_the_numbers_of_a_column_have_one_form() -> None:
    assert numbers.si_alike([2.04e12, 4.05e11, 0], "FLOPs") == ["2,040 GFLOPs", "405 GFLOPs", "0"]
    assert numbers.si_alike([7e21, 65_200], "FLOPs") == ["7.00 ZFLOPs", "65.2 kFLOPs"]
    assert numbers.si_alike([1_690_000, 880_000]) == ["1,690k", "880k"]
    assert numbers.si_alike([14_437, 939, 5]) == ["14,437", "939", "5"]
    assert numbers.si_alike([99_999, 1]) == ["99,999", "1"] and numbers.si_alike([100_000, 0, 1]) == ["100k", "0", "1"]
    assert numbers.durations_alike([5.1, 96.0]) == ["0 min 05 s", "1 min 36 s"]
    assert numbers.durations_alike([5.14, 24.4]) == ["5.1 s", "24.4 s"]
    assert numbers.durations_alike([7200.0, 60.0]) == ["2 h 00 min", "0 h 01 min"]
    assert numbers.durations_alike([3599.7, 2.0]) == ["1 h 00 min", "0 h 00 min"]
    assert numbers.durations_alike([0.5, 0.9999]) == ["0.5 s", "1.0 s"]
    assert numbers.si_alike([]) == [] and numbers.durations_alike([]) == []
