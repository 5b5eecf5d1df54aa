from textkit.cases import slugify, title, words


def test_words():
    assert words("It's 2 o'clock") == ["it", "s", "2", "o", "clock"]


def test_slugify():
    assert slugify("Hello, World!") == "hello-world"


def test_title():
    assert title("hello_world") == "Hello World"
