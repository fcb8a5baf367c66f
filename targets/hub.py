"""Checkpoints and heads by their names on the Hugging Face hub: `org/name` or `org/name@revision`.

Only data is fetched: weights as safetensors and the JSON and template files beside them, never code
and never pickles. The library keeps them in its cache (HF_HOME), goes on with what was cut off, and
heeds HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.core.ticking import ticking
from targets.published import instead_of_gguf

NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
WANTED = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""Files that are read, by pattern; at the top of a repository, not in its folders."""
GGUF = ".gguf"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_name(model: str) -> bool:
    """Whether `model` names a repository of the hub: an existing folder of that name comes
    first."""
    return NAME.fullmatch(model) is not None and not Path(model).is_dir()


def folder_of(name: str, absent: str) -> Path:
    """A folder, or that of a repository's files, downloaded if need be. Raises UserError, of which
    `absent` is the text where there is no such folder."""
    if name.lower().endswith(GGUF):
        raise refusal_of_gguf(name)
    if is_name(name):
        return fetched(name)
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(absent)
    if any(folder.glob(f"*{GGUF}")) and not any(folder.glob("*.safetensors")):
        raise refusal_of_gguf(name)
    return folder


def refusal_of_gguf(name: str) -> UserError:
    return UserError(
        f"{name} is GGUF, which specdec does not read: choose the safetensors of these weights, "
        f"{instead_of_gguf(name)}"
    )


def kept_folder(name: str, file: str) -> Path | None:
    """The folder in the cache with this file of a repository, if it was downloaded before. The hub
    is not contacted."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(match["repo"], file, revision=match["revision"])
    return Path(found).parent if isinstance(found, str) else None


def is_kept(name: str) -> bool:
    """Whether a repository's weights, of a single file, were downloaded before."""
    folder = kept_folder(name, "config.json")
    return folder is not None and (folder / "model.safetensors").is_file()


def repo_of(name: str) -> str:
    """Without its revision."""
    return name.partition("@")[0]


@lru_cache
def fetched(name: str) -> Path:
    """The folder of a repository's files, downloaded if need be. Raises UserError."""
    match = NAME.fullmatch(name)
    assert match, name
    repo, revision = match["repo"], match["revision"]
    try:
        return _fetched(repo, revision)
    except UserError:
        raise
    except Exception as problem:  # the library's errors have no common base
        raise UserError(f"{name}: {_failure(problem, repo, revision)}") from problem


@dataclass(frozen=True)
class _File:
    name: str
    size: int


def _fetched(repo: str, revision: str | None) -> Path:
    import huggingface_hub as hub

    try:
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as problem:
        if not _unreachable(problem):
            raise
        return _kept(repo, revision, problem)
    every = [_File(s.rfilename, s.size or 0) for s in info.siblings or ()]
    files = [file for file in every if any(_like(file.name, p) for p in WANTED)]
    _check_weights(repo, [file.name for file in every])
    missing = sum(f.size for f in files if not _is_kept(repo, f.name, info.sha))
    _check_room(repo, missing)
    with _reported(repo, missing):
        names = [file.name for file in files]
        folder = hub.snapshot_download(repo, revision=info.sha, allow_patterns=names)
        _remember(repo, revision, info.sha)
    return Path(folder)


def _kept(repo: str, revision: str | None, problem: Exception) -> Path:
    """The files of an earlier download, for when the hub can't be reached."""
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                local_files_only=True,
                allow_patterns=list(WANTED),
                ignore_patterns="*/*",
            )
        )
    except LocalEntryNotFoundError:
        raise problem from None
    _check_weights(repo, [file.name for file in folder.iterdir()])
    return folder


def _remember(repo: str, revision: str | None, sha: str | None) -> None:
    """Store a branch's commit, as the library does when it downloads a branch: offline runs look it
    up by the branch's name."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repo, repo_type="model")
    ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / (revision or "main")
    if sha and revision != sha:
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(sha)


def _is_kept(repo: str, file: str, sha: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, file, revision=sha), str)


def _check_weights(repo: str, names: list[str]) -> None:
    if any(_like(name, "*.safetensors") for name in names):
        return
    if any(name.endswith(GGUF) for name in names):
        raise refusal_of_gguf(repo)
    if any(_like(name, pattern) for name in names for pattern in PICKLES):
        raise UserError(
            f"{repo} has its weights as pickles only, which may run code when they are read: "
            "choose a repository with safetensors"
        )
    raise UserError(f"{repo} holds no safetensors: name a repository with a model's weights")


def _like(name: str, pattern: str) -> bool:
    return "/" not in name and fnmatch.fnmatchcase(name, pattern)


def _check_room(repo: str, missing: int) -> None:
    cache = _cache()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise UserError(
            f"{repo} needs {missing / 1e9:.1f} GB more in {cache} and {free / 1e9:.1f} GB are "
            "free: make room, or set HF_HOME to another disk"
        )


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


@contextmanager
def _reported(repo: str, missing: int) -> Iterator[None]:
    """Report a download's progress: the library's bars on a terminal, else a line now and then."""
    if not missing:
        yield
        return
    total = f"{missing / 1e9:.2f} GB"
    print(f"downloading {repo}: {total} to {_cache()}", file=sys.stderr)
    if sys.stderr.isatty():
        yield
        return
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    before = _stored(repo)

    def tell() -> None:
        done = (_stored(repo) - before) / 1e9
        print(f"downloading {repo}: {done:.2f} of {total}", file=sys.stderr)

    with ticking(tell):
        yield


def _stored(repo: str) -> int:
    """Bytes of its files, unfinished ones too."""
    folder = _cache() / f"models--{repo.replace('/', '--')}" / "blobs"
    sizes = []
    for file in folder.glob("*"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:  # renamed meanwhile
            continue
    return sum(sizes)


def _unreachable(problem: Exception) -> bool:
    """No network, or offline mode. Types are compared by name, because the HTTP library depends on
    huggingface_hub's version."""
    from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(problem, HfHubHTTPError):
        return False
    if isinstance(problem, LocalEntryNotFoundError):  # for a file that could not be requested
        return True
    kind = type(problem)
    http = kind.__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
    return isinstance(problem, (OfflineModeIsEnabled, ConnectionError, TimeoutError)) or http


def _failure(problem: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import utils

    if isinstance(problem, utils.GatedRepoError):
        return (
            f"access to {repo} is granted by its owners: accept its terms on its page, and set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(problem, utils.RevisionNotFoundError):
        return f"{repo} has no revision {revision}: name a branch, a tag or a commit"
    if isinstance(problem, utils.RepositoryNotFoundError):
        return (
            "no folder of that name, and no such model on the Hugging Face hub for your token: "
            "check its name; private ones need HF_TOKEN"
        )
    if isinstance(problem, utils.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it was not downloaded before: unset it, or name a folder"
    if _unreachable(problem):
        return (
            "no folder of that name, and the Hugging Face hub cannot be reached "
            f"({type(problem).__name__}): check the network, or name a folder"
        )
    status = getattr(getattr(problem, "response", None), "status_code", None)
    cause: Any = f"status {status}" if status else f"{type(problem).__name__}: {problem}"
    return f"the Hugging Face hub did not deliver it ({cause}): try again, what came is kept"
