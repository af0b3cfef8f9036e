"""`trinity-es dashboard`: a log in a browser, live or of a run that ended long ago.

Everything it shows it reads from the log (`log_reader.Log`, for reading only), so it needs no actor, GPU or
torch, and harms no run. The rooms of this package:

| module | what it does |
|---|---|
| `page.py` | what a page is: a function from an `Ask` to a `Page`, run in a thread; links between pages |
| `pages/` | the pages, a module each; a new one is a module there, a template, and a name in `pages.MODULES` |
| `rendering.py` | jinja2, which escapes everything, and how numbers and times look |
| `live.py` | one tail of the log for all open pages; server-sent events |
| `access.py` | who may read: the Host header, the token, the headers of every answer |
| `app.py`, `serving.py` | the routes, and the server |

How to add a page is told in `pages/__init__.py`.
"""
