"""The dashboard: a web server that shows the log of a live run or of an old one.

It only reads the log, so it needs no actor, GPU or torch and cannot disturb a run.

| module | content |
|---|---|
| `page_urls.py` | types of pages and requests, links between pages |
| `pages/` | the pages, a module each; its docstring says how to add one |
| `rendering.py` | jinja2 with autoescape; formats of numbers and times |
| `live.py` | one tail of the log for all open pages; server-sent events |
| `access.py` | access control: Host header, token, security headers |
| `app.py`, `server.py` | the routes and the server |
"""
