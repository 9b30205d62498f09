"""What the bridges are made of: a finder of modules, the table of names, and classes with other arguments."""
