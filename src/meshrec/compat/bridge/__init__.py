"""The building blocks of bridges: a finder of modules, the table of names, and classes with other
arguments.
"""
