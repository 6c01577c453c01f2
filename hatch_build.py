"""The build's hook: README.md as a package index shows it, and the project's addresses, all made of one address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The target of a Markdown link that is neither an address nor a place on the page.
_RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#)")


class CustomMetadataHook(MetadataHookInterface):
    """Gives the metadata `urls` and `readme` from `repository`, a setting of this hook in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Make the relative links of README.md absolute: a package index knows no other file of the repository."""
        repository: str = self.config["repository"]
        files = f"{repository}/blob/main/"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _RELATIVE.sub(files, text)}
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": f"{files}docs",
            "Changelog": f"{files}CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
