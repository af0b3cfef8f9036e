"""The dashboard: a log in a browser, of a live run or of one that ended long ago.

It reads only the log, so it needs no actor, GPU or torch and cannot disturb a run.

| module | content |
|---|---|
| `page_urls.py` | pages, requests for them, and links between them |
| `pages/` | the pages, a module each; its docstring says how to add one |
| `rendering.py` | jinja2 with autoescape; formats of numbers and times |
| `live.py` | one tail of the log for all open pages; server-sent events |
| `access.py` | access: the Host header, the token, the headers of every answer |
| `app.py`, `server.py` | the routes and the server |
"""
