"""Rendering of pages: templates, and formats of numbers and local times.

No text of a rollout, an error or an id is ever markup: autoescape is on for every template, no template uses `safe`
(tests/full/dashboard/test_hostile.py checks that), and control characters are shown as escapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from markupsafe import Markup

from trinity_es.dashboard import page_urls
from trinity_es.events.values import local_time
from trinity_es.projections.why.answer import span
from trinity_es.safe_text import plain, shown

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "HERE", "bar", "clock", "count", "duration", "environment", "json_data", "moment", "named", "number",
    "render", "state", "when", "zone",
]

HERE = Path(__file__).parent
NONE = Markup('<span class="none">–</span>')


def count(value: float | None) -> str | Markup:
    """Format a number like 1,234,567."""
    return NONE if value is None else f"{value:,.0f}"


def number(value: float | None, digits: int = 3) -> str | Markup:
    """Format a number with this many decimals; from 1e9 on, with four digits and an exponent."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.4g}"


def clock(seconds: float | None) -> str | Markup:
    """Format unix seconds as local time without the date."""
    return NONE if seconds is None else _local_time(seconds, "%H:%M:%S")


def moment(seconds: float | None) -> str | Markup:
    """Format unix seconds as local date and time, with milliseconds and UTC offset."""
    return NONE if seconds is None else local_time(seconds, "milliseconds", " ")


def when(seconds: float | None) -> Markup:
    """Format unix seconds for a table: local date and time without the year. The tooltip has both in full."""
    if seconds is None:
        return NONE
    return Markup('<time title="{}">{}</time>').format(moment(seconds), _local_time(seconds, "%m-%d %H:%M:%S"))


def _local_time(seconds: float, time_format: str) -> str:
    """Format unix seconds as local time. Adds the UTC offset if it differs from the current one (summer time)."""
    local, now = datetime.fromtimestamp(seconds, UTC).astimezone(), datetime.now().astimezone()
    return local.strftime(time_format) + (local.isoformat()[-6:] if local.utcoffset() != now.utcoffset() else "")


def zone() -> str:
    """Return this machine's current UTC offset, such as UTC+01:00."""
    offset = datetime.now().astimezone().strftime("%z")
    return f"UTC{offset[:3]}:{offset[3:5]}" if offset.strip("+-0") else "UTC"


def named(name: object, href: str, width: int) -> Markup:
    """Return a link with this name. A longer name than `width` is cut, and its tooltip has all of it."""
    title = Markup(' title="{}"').format(plain(name, 500)) if len(str(name)) > width else ""
    return Markup('<a href="{}"{}>{}</a>').format(href, title, plain(name, width))


def duration(seconds: float | None) -> str | Markup:
    return NONE if seconds is None else span(seconds)


def tail_of(path: str, parts: int) -> str:
    """Return the last `parts` parts of a path, which distinguish one log from another."""
    names = plain(path).split("/")
    return "…/" + "/".join(names[-parts:]) if len(names) > parts else plain(path)


def state(name: str) -> Markup:
    return Markup('<span class="state s-{0}">{0}</span>').format(plain(name, 20))


def bar(row: Any) -> Markup:
    """Return the progress bar of a batch, with its finished, failed and dropped tasks."""
    total = max(row.tasks, 1)
    counts = {"finished": row.finished, "failed": row.failed, "dropped": row.dropped}
    parts, x = Markup(""), 0.0
    for name, value in counts.items():
        width = 80 * value / total
        if value:
            parts += Markup('<rect class="f-{}" x="{:.2f}" width="{:.2f}" height="8"/>').format(name, x, width)
        x += width
    title = ", ".join(f"{value:,} {name}" for name, value in counts.items() if value or name == "finished")
    return Markup(
        '<span class="bar" title="{} of {:,} tasks"><svg width="80" height="8" aria-hidden="true">'
        '<rect class="f-all" width="80" height="8"/>{}</svg><span class="of">{:,}<i>/</i>{:,}</span></span>'
    ).format(title, row.tasks, parts, row.finished, row.tasks)


def json_data(value: Any, element_id: str) -> Markup:
    """Return a hidden element with this id that holds a chart's data as JSON."""
    text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    return Markup('<div hidden id="{}">{}</div>').format(element_id, text)


@cache
def environment() -> Environment:
    """Return the jinja2 environment, in which an undefined name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "plain": plain, "count": count, "number": number, "clock": clock, "moment": moment, "when": when,
        "duration": duration, "state": state, "tail_of": tail_of, "shown": shown,
    }
    env.globals |= {
        "batch_url": page_urls.batch_url, "rollout_url": page_urls.rollout_url, "runner_url": page_urls.runner_url,
        "rollouts_url": page_urls.rollouts_url, "weights_url": page_urls.weights_url,
        "rollout_of": lambda batch_id, task: partial(page_urls.rollout_url, batch_id, task),
        "link": page_urls.link, "json_data": json_data, "bar": bar, "named": named, "zone": zone,
    }
    return env


def render(template: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(values)
