"""Folders with models that somebody names, on the command line or in the environment."""

from __future__ import annotations

import os
from typing import Any

from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings


def settings_with_folders(**overrides: Any) -> Settings:
    """Settings for a command that looks for models.

    Raises:
        InvalidRequestError: a setting that cannot be, or a further folder with models that is not there: somebody has
            named it, and would look in vain for its models. The lab's own is made when it is needed.
    """
    settings = Settings.read(**overrides)
    for folder in settings.model_folders:
        if not os.path.isdir(folder):
            raise InvalidRequestError(
                f"model_folders: {folder} is no folder that can be read; make it, or name another one in --models of "
                "lmx-lab serve or in LMX_LAB_MODEL_FOLDERS",
                param="model_folders",
            )
    return settings
