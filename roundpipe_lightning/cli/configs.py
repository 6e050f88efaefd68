"""Where the Hydra configuration is: in the installed package, or at the top of the repository."""

from pathlib import Path

from roundpipe_lightning.errors import ConfigurationError


def find_config_folder() -> Path:
    """Folder with `train.yaml` and the configuration groups.

    A wheel carries it inside the package. A checkout keeps it at the repository's top level.

    Raises:
        ConfigurationError: It is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigurationError(
        f"No conf/train.yaml in {package} or {package.parent}: the installation is incomplete. "
        "Reinstall roundpipe-lightning, or run train.py from a complete checkout."
    )
