import pytest

from routes.router import NotFound, Router


@pytest.fixture
def router():
    router = Router()
    router.add("/", "home")
    router.add("/users/<name>", "user")
    router.add("/users/<name>/posts/<post>", "post")
    return router


@pytest.mark.parametrize(
    ("path", "handler", "values"),
    [("/", "home", {}), ("/users/ann", "user", {"name": "ann"}), ("/users/a/posts/7/", "post", {"name": "a", "post": "7"})],
)
def test_match(router, path, handler, values):
    assert router.match(path) == (handler, values)


@pytest.mark.parametrize("path", ["/users", "/users/a/b", "/user/a"])
def test_not_found(router, path):
    with pytest.raises(NotFound):
        router.match(path)


def test_first_route_wins(router):
    router.add("/users/ann", "ann")
    assert router.match("/users/ann")[0] == "user"
