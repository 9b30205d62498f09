"""Self-contained HTML pages: a common skeleton and style, and a script per kind of page."""
