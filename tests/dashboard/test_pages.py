"""Every page of the dashboard, as its server answers it."""

from __future__ import annotations

from fastapi.testclient import TestClient


def test_every_entry_of_the_navigation_leads_to_a_page(client: TestClient) -> None:
    from trinity_es.dashboard import pages

    for entry in pages.navigation():
        answer = client.get(entry.path)
        assert answer.status_code == 200, entry
        assert f'href="{entry.path}"' in answer.text
