"""Folders on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from roundpipe_lightning.errors import ModelSourceError

_ERRORS = (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError)


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
    """Upload a folder to a repository, and return its address.

    Raises:
        ModelSourceError: The hub cannot be reached, or does not let this user write there.
    """
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
