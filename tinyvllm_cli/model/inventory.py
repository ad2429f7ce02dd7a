"""The models that can be named, and which of them are on this machine."""

from __future__ import annotations

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.catalogue import CATALOGUE, locate
from tinyvllm_cli.said import format_bytes


def known_models() -> list[tuple[str, str, str, str, str]]:
    """Name, size, licence, whether it is here, and what it is: the catalogue, then the Hub cache."""
    rows = [
        (entry.name, format_bytes(entry.source.size), entry.licence, "yes" if locate(entry) else "no", entry.summary)
        for entry in CATALOGUE.values()
    ]
    return [*rows, *((repo, format_bytes(size), "-", "yes", "from the Hub") for repo, size in _hub_models())]


def _hub_models() -> list[tuple[str, int]]:
    """Repositories in the Hub cache, with their bytes on disk."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except RuntimeError:  # a user without a home has no Hub cache either
        return []
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    except (ValueError, OSError) as error:  # ValueError: a file where the folder should be
        raise ModelError(f"the Hub cache cannot be read: {error}") from None
    return sorted((repo.repo_id, repo.size_on_disk) for repo in repos if repo.repo_type == "model")
