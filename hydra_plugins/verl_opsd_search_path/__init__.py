"""Puts this project's config groups on Hydra's search path, so that `+recipe=...` resolves in verl's own commands."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_opsd.paths import conf_dir
from verl_opsd.plugin import register_resolvers

register_resolvers()


class VerlOpsdSearchPathPlugin(SearchPathPlugin):
    """Found by Hydra in the `hydra_plugins` namespace; registered by `verl_opsd.plugin` where an editable install hides it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-opsd", path=f"file://{conf_dir()}")
