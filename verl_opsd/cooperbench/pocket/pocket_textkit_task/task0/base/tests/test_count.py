from textkit.count import most_common


def test_most_common():
    assert most_common("b a b c a b", 2) == [("b", 3), ("a", 2)]
