"""Text from outside (a rollout, a user, an error message) as a page may show it.

HTML is escaped by the templates, always and everywhere; this is about what escaping leaves: control characters, which a
copy into a terminal would obey, and characters that turn or hide the text around them. They become their escapes.
Unlike `plain`, which is for one line of anything, this keeps the spaces and joiners that many languages are made of.
"""

from __future__ import annotations

import re

__all__ = ["cut", "shown"]

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: object) -> str:
    """Write out every character that would act: ESC is `\\x1b`, the right-to-left override `\\u202e`.

    Line breaks and tabs stay; so do all letters of all languages.
    """
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], str(text))


def cut(text: object, length: int) -> tuple[str, int]:
    """Return (the beginning as `shown`, characters left out), where the beginning is at most `length` long."""
    whole = str(text)
    return shown(whole[:length]), max(0, len(whole) - length)
