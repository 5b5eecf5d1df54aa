from textkit.wrap import wrap


def test_wrap():
    assert wrap("one two three", 7) == ["one two", "three"]


def test_long_word_has_its_own_line():
    assert wrap("a extraordinary b", 5) == ["a", "extraordinary", "b"]


def test_empty():
    assert wrap("", 10) == []
