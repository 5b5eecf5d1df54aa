import pytest

from inifile.reader import ParseError, get, parse


def test_sections():
    assert parse("[a]\nx = 1\n[b]\ny = 2") == {"a": {"x": "1"}, "b": {"y": "2"}}


def test_no_section():
    assert parse("x=1") == {"": {"x": "1"}}


def test_comment_line():
    assert parse("; nothing\nx = 1") == {"": {"x": "1"}}


def test_error_names_the_line():
    with pytest.raises(ParseError, match="line 2"):
        parse("x = 1\nnonsense")


def test_get():
    assert get({"a": {"x": "1"}}, "a", "x") == "1"
    assert get({}, "a", "x", "none") == "none"
