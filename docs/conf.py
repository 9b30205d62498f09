"""Sphinx's settings for the documentation: ``make docs``."""

project = "MeshRec"
copyright = "the MeshRec authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated/cli.md", "_generated/errors.md", "**.ipynb"]

html_theme = "furo"
html_title = "MeshRec"

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes sections describe fields that autodoc lists too.
napoleon_use_ivar = True
# Docstrings are read in the editor first; a single backtick there is code, too.
default_role = "code"
