"""Fixtures of many tests. TINYVLLM_NO_MODEL_TESTS=1 deselects those marked `model`, which need the default one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tiny import make_tiny_model

from tinyvllm_cli.config import DEFAULT_MODEL

settings.register_profile("patient", deadline=None)  # how long an example takes says more of the machine than of us
settings.load_profile("patient")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, never skip: a run without these tests says so in its summary, and a missing model is a failure."""
    if os.environ.get("TINYVLLM_NO_MODEL_TESTS") != "1":
        return
    deselected = [item for item in items if item.get_closest_marker("model")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not item.get_closest_marker("model")]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The file of the default model, fetched once into the user's cache."""
    from tinyvllm_cli.model.hub import find_model

    return find_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the module's own, and no model in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYVLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("TINYVLLM_MODEL", raising=False)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights; nobody changes it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
