from inifile.writer import dump


def test_dump():
    assert dump({"": {"x": "1"}, "a": {"y": "2"}}) == "x = 1\n\n[a]\ny = 2\n"
