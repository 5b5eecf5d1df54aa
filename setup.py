"""Maps the top-level `hydra_conf/` into the package, so that a wheel carries it as `verl_opsd/hydra_conf`."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

conf = [
    ".".join(("verl_opsd", *p.relative_to(Path(__file__).parent).parts))
    for p in sorted((Path(__file__).parent / "hydra_conf").glob("**"))
    if p.is_dir()
]
setup(
    packages=find_namespace_packages(include=["verl_opsd*", "hydra_plugins*"]) + conf,
    package_dir={"verl_opsd.hydra_conf": "hydra_conf"},
)
