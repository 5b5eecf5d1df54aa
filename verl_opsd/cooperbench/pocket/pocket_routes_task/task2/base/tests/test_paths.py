from routes.paths import join, split


def test_split():
    assert split("/a//b/") == ["a", "b"]


def test_join():
    assert join("/a/", "b", "/c") == "/a/b/c"
    assert join() == "/"
