"""What is read from the Hugging Face hub, and folders that are written to it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from roundpipe_lightning.errors import ModelSourceError

_ERRORS = (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError)


def unreadable(what: str, name: str, error: Exception, *, otherwise: str) -> ModelSourceError:
    """Say in a line why something on the hub, or in a local folder, is not read, and what to do.

    `otherwise` is what to do where it is not the name, the revision or the access that is wrong.
    """
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    lines = [line for line in str(error).splitlines() if line.strip()]
    cause = lines[0] if lines else type(error).__name__
    if any(isinstance(each, GatedRepoError) for each in causes):  # is a RepositoryNotFoundError
        return ModelSourceError(
            f"{what} is gated or private ({cause}). Ask for access on its page on the hub, then "
            "log in (`hf auth login`) or set HF_TOKEN. A local folder with its files does as well."
        )
    if any(isinstance(each, RevisionNotFoundError) for each in causes):
        return ModelSourceError(
            f"{what} has no such revision on the hub ({cause}). Set model.revision to a branch, "
            "tag or commit that its page shows, or to null for the newest."
        )
    if any(isinstance(each, RepositoryNotFoundError) for each in causes):
        return ModelSourceError(
            f"{what} is neither on the hub nor a folder here ({cause}). Look at the spelling "
            "(owner/name); if it is private, log in (`hf auth login`) or set HF_TOKEN."
        )
    place = "this place" if Path(name).exists() else "the Hugging Face hub"
    return ModelSourceError(f"{what} cannot be loaded from {place} ({cause}). {otherwise}")


def make_repository(name: str) -> None:
    """Make a private repository of that name, if there is none: what is refused is refused early.

    Raises:
        ModelSourceError: The hub cannot be reached, or does not let this user write there.
    """
    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
    except _ERRORS as error:
        raise _explained(name, error) from error


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder to a repository, and return its address; raises as `make_repository`."""
    try:
        done = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a trained model"
        )
    except _ERRORS as error:
        raise _explained(name, error) from error
    return str(done.repo_url)


def _explained(name: str, error: Exception) -> ModelSourceError:
    cause = next(filter(None, str(error).splitlines()), type(error).__name__)
    return ModelSourceError(
        f"push_to_hub={name!r}: {cause} Name it user/model, and log in with a token that may write "
        "(`hf auth login`, or HF_TOKEN)."
    )
