"""Fixed tables, with all rows in a single tensor: floating-point values, or codes with a scale and a bias.

In a *fixed* table, unlike in a hashed table, IDs are row numbers, and every ID has a row.
"""
