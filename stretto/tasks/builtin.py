"""Programming problems that come with the package, in MBPP's layout: enough to try a run with nothing downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

BUILTIN: Final[tuple[Mapping[str, Any], ...]] = (
    {
        "text": "Write a function that adds the digits of a non-negative integer.",
        "code": "def digit_sum(n):\n    return sum(int(digit) for digit in str(n))",
        "test_list": ["assert digit_sum(0) == 0", "assert digit_sum(1234) == 10", "assert digit_sum(9999) == 36"],
    },
    {
        "text": "Write a function that tells whether a text reads the same backwards, letters' case ignored.",
        "code": "def is_palindrome(text):\n    text = text.lower()\n    return text == text[::-1]",
        "test_list": [
            "assert is_palindrome('Level') == True",
            "assert is_palindrome('stretto') == False",
            "assert is_palindrome('') == True",
        ],
    },
    {
        "text": "Write a function that counts how often each word occurs in a text, words being what white space parts.",
        "code": "from collections import Counter\n\ndef count_words(text):\n    return Counter(text.split())",
        "test_list": [
            "assert count_words('a b a') == {'a': 2, 'b': 1}",
            "assert count_words('') == {}",
            "assert count_words('to be or not to be') == {'to': 2, 'be': 2, 'or': 1, 'not': 1}",
        ],
    },
    {
        "text": "Write a function that merges two ascending lists into one ascending list.",
        "code": "def merge(left, right):\n    return sorted(left + right)",
        "test_list": [
            "assert merge([1, 4], [2, 3]) == [1, 2, 3, 4]",
            "assert merge([], [5]) == [5]",
            "assert merge([1, 1], [1]) == [1, 1, 1]",
        ],
    },
    {
        "text": "Write a function that gives the n-th Fibonacci number, the 0-th being 0 and the first 1.",
        "code": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        "test_list": ["assert fibonacci(0) == 0", "assert fibonacci(10) == 55", "assert fibonacci(30) == 832040"],
    },
    {
        "text": "Write a function that gives the primes below n, ascending.",
        "code": "def primes(n):\n    return [i for i in range(2, n) if all(i % j for j in range(2, int(i**0.5) + 1))]",
        "test_list": [
            "assert primes(2) == []",
            "assert primes(12) == [2, 3, 5, 7, 11]",
            "assert primes(30) == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]",
        ],
    },
    {
        "text": "Write a function that turns the rows of a matrix, a list of lists, into its columns.",
        "code": "def transpose(rows):\n    return [list(column) for column in zip(*rows)]",
        "test_list": [
            "assert transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]",
            "assert transpose([[1, 2, 3]]) == [[1], [2], [3]]",
            "assert transpose([]) == []",
        ],
    },
    {
        "text": "Write a function that gives the greatest common divisor of two positive integers.",
        "code": "def common_divisor(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        "test_list": [
            "assert common_divisor(12, 18) == 6",
            "assert common_divisor(7, 13) == 1",
            "assert common_divisor(100, 10) == 10",
        ],
    },
)
