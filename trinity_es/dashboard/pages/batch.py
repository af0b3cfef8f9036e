"""One batch."""

from __future__ import annotations

from trinity_es.dashboard.page import Ask, Page, Route

__all__ = ["ROUTES", "batch"]


def batch(ask: Ask) -> Page:
    """One batch."""
    batch_id = ask.batch()
    return Page(template="batch.html", title=f"Batch {batch_id}", nav="batches", values={"row": ask.log.batch_row(batch_id)})


ROUTES = [Route("/batch", batch)]
