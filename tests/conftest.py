"""The default model for the tests marked `model`; TINYVLLM_NO_MODEL_TESTS=1 deselects them."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

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
