"""One model of the Hugging Face Hub in the Hub's own cache: the files that are needed, and no others."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.storage import is_offline, require_room
from tinyvllm_cli.said import format_bytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
TIMEOUT_S = 15.0
OTHER_WAYS = "other ways: a model folder, a .gguf file, or a name from `tinyvllm models list`"


def fetch(
    repo: str, file: str | None, *, revision: str | None, report: Callable[[str], None], progress: bool
) -> tuple[Path, str]:
    """The folder of `repo` (or its one GGUF `file`) in the Hub cache and its commit; missing files are downloaded.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are huggingface_hub's to obey. Where the Hub cannot be asked, a
    whole copy in the cache serves, and `report` says so. Raises ModelError.
    """
    from huggingface_hub import constants

    offline = "TINYVLLM_OFFLINE" if is_offline() else "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else None
    reason = f"{offline} is set"
    if offline is None:
        try:
            return _download(repo, file, revision, report, progress)
        except ModelError:
            raise
        except Exception as error:  # its HTTP library, and so what it raises, changes with huggingface_hub's version
            reason = _reason(error, repo, revision)
    cached = find_cached(repo, file, revision=revision)
    if cached is None:
        raise ModelError(f"cannot fetch {repo}, and no whole copy is in the Hub cache: {reason}; {OTHER_WAYS}")
    if offline is None:
        report(f"using the copy of {repo} in the Hub cache, commit {cached[1][:12]}: {reason}")
    return cached


def find_cached(repo: str, file: str | None, *, revision: str | None) -> tuple[Path, str] | None:
    """The same from the cache alone, without network; None where it is not there or not whole."""
    from huggingface_hub import try_to_load_from_cache

    asked = file or "config.json"
    try:
        found = try_to_load_from_cache(repo, asked, revision=revision)
    except ValueError as error:  # its checks of names, HFValidationError among them
        reason = " ".join(str(error).split())
        raise ModelError(f"{repo}/{asked} is no name that the Hub could have: {reason}") from None
    except OSError as error:
        raise ModelError(f"the Hub cache cannot be read: {error}") from None
    if not isinstance(found, str):
        return None
    snapshot = Path(found).parents[len(Path(asked).parts) - 1]
    if not file and not _is_whole(snapshot):
        return None
    return (Path(found) if file else snapshot), snapshot.name


def _download(
    repo: str, file: str | None, revision: str | None, report: Callable[[str], None], progress: bool
) -> tuple[Path, str]:
    import huggingface_hub as hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its advice on tokens is no part of our output
    if not progress:
        disable_progress_bars()
    info = hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_S, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    if file is None:
        wanted = choose_files(
            repo, sizes, lambda: Path(hub.hf_hub_download(repo, INDEX, revision=revision)).read_bytes()
        )
    else:
        wanted = [_gguf_file(repo, file, sizes)]
    commit = info.sha or ""
    missing = [name for name in wanted if not isinstance(hub.try_to_load_from_cache(repo, name, revision=commit), str)]
    if missing:
        total = sum(sizes[name] for name in missing)
        cache = Path(hub.constants.HF_HUB_CACHE)
        require_room(cache, total, what=f"{repo} ({len(missing)} files)", variable="HF_HOME")
        report(f"fetching {repo}: {format_bytes(total)}, {len(missing)} files, commit {commit[:12]}, from {_url(repo)}")
    # By the revision as it was given, so that the cache learns where a branch stands and can serve it offline.
    folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    return (folder / file if file else folder), folder.name


def choose_files(repo: str, names: Collection[str], read_index: Callable[[], bytes]) -> list[str]:
    """The files of a repository (or of a folder of the cache) that a model is read from. Raises ModelError.

    Weights are `model.safetensors`, or what the index lists: never original/, consolidated or PyTorch copies of them.
    """
    gguf = sorted(name for name in names if name.lower().endswith(".gguf"))
    if gguf and not {WEIGHTS, INDEX} & set(names):
        raise ModelError(f"{repo} holds GGUF files: name one of them, such as {repo}/{gguf[0]} ({_some(gguf)})")
    if "config.json" not in names:
        raise ModelError(f"{repo} has no config.json, so it is no model in Hugging Face layout; it has {_some(names)}")
    if WEIGHTS in names:
        weights = [WEIGHTS]
    elif INDEX in names:
        weights = [INDEX, *_shards(repo, read_index())]
    else:
        held = [name for name in names if name.endswith((".bin", ".safetensors", ".pth", ".pt"))]
        raise ModelError(f"{repo} has no {WEIGHTS} or {INDEX}; its weight files are {_some(held) or 'none'}")
    absent = [name for name in weights if name not in names]
    if absent:
        raise ModelError(f"{repo} lacks {_some(absent)}, which {INDEX} lists")
    return ["config.json", *(name for name in TEXT_FILES if name in names), *weights]


def _shards(repo: str, index: bytes) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{INDEX} of {repo} has no readable weight_map ({error!r})") from None


def _gguf_file(repo: str, file: str, names: Collection[str]) -> str:
    if file in names:
        return file
    held = sorted(name for name in names if name.lower().endswith(".gguf"))
    nearest = difflib.get_close_matches(file, held, n=1)
    hint = f"did you mean {repo}/{nearest[0]}?" if nearest else f"its GGUF files are {_some(held) or 'none'}"
    raise ModelError(f"{repo} has no file {file}; {hint}")


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has all that a model is read from: an interrupted download leaves a part."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.exists()]
        return "tokenizer.json" in choose_files(str(folder), names, (folder / INDEX).read_bytes)
    except (ModelError, OSError):
        return False


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    """Why the Hub gave nothing, in words that say what to do."""
    from huggingface_hub import errors

    login = "set HF_TOKEN to a token of an account that may read it"
    if isinstance(error, errors.GatedRepoError):  # before RepositoryNotFoundError, its base
        return f"it is gated: accept its terms at {_url(repo)}, then {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{_url(repo)} does not exist, or is private ({login})"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision}"
    text = " ".join(str(error).split())[:300]
    return f"the Hub could not be asked ({type(error).__name__}: {text})"


def _url(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


def _some(names: Collection[str], limit: int = 5) -> str:
    listed = sorted(names)[:limit]
    return ", ".join(listed) + (f" and {len(names) - limit} more" if len(names) > limit else "")
