"""mkdocs hook: print links to folders and to files outside docs/ as plain text, since the site does not have them."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Unlink targets that exist in the repository but not in the site, so that strict mode names only broken links."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        return link[1] if target.is_dir() or (target.exists() and docs not in target.parents) else link[0]

    return LINK.sub(shown, markdown)
