"""What `make lab` adds to the settings of JupyterLab: a notebook is saved as git has it."""

import warnings
from typing import Any

from sage_lib.files import in_form

# traitlets takes the hook below twice, and warns of the second time.
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook")


def _before_saving(model: dict[str, Any], **_: object) -> None:
    if model["type"] == "notebook":
        model["content"] = in_form(model["content"])


c.FileContentsManager.pre_save_hook = _before_saving  # type: ignore[name-defined]  # noqa: F821
