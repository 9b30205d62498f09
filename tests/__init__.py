"""A package, so that no folder of this name that a library installs is taken for it."""
