"""Report pages: HTML files without external resources. They share a skeleton, and have a script per kind."""
