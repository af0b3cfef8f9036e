"""Text from outside (a rollout, a user, an error message) as a page may show it.

HTML is escaped by the templates, always and everywhere; this is about what escaping leaves: control characters, which a
copy into a terminal would obey, and characters that turn or hide the text around them. They become visible signs.
"""

from __future__ import annotations

import re

__all__ = ["cut", "shown"]

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: object) -> str:
    """The text with every character that would act made a sign: ESC is `␛`, U+202E is `⟨U+202E⟩`.

    Line breaks and tabs stay; so do all letters of all languages.
    """
    return _CONTROL.sub(_sign, str(text))


def _sign(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def cut(text: object, length: int) -> tuple[str, int]:
    """(the beginning as `shown`, characters left out), where the beginning is at most `length` long."""
    whole = str(text)
    return shown(whole[:length]), max(0, len(whole) - length)
