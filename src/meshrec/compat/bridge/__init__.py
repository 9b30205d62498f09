"""Building blocks for bridges: import hook, name table, and classes with other libraries' arguments."""
