from spans.text import show


def test_show():
    assert show([(7, 8), (1, 4)]) == "1-3,7"
    assert show([]) == ""
