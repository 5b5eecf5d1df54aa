import pytest

from spans.core import contains, normalize, union


@pytest.mark.parametrize(
    ("spans", "result"),
    [
        ([(5, 7), (1, 3)], [(1, 3), (5, 7)]),
        ([(1, 3), (2, 6)], [(1, 6)]),
        ([(1, 3), (3, 4)], [(1, 4)]),
        ([(1, 9), (2, 3)], [(1, 9)]),
        ([(4, 4)], []),
    ],
)
def test_normalize(spans, result):
    assert normalize(spans) == result


def test_contains():
    assert [contains([(1, 3), (5, 6)], number) for number in range(7)] == [False, True, True, False, False, True, False]


def test_union():
    assert union([(1, 3)], [(2, 4), (8, 9)]) == [(1, 4), (8, 9)]
