"""Numbers of bytes for people."""


def size_text(num_bytes: float) -> str:
    """``1.58 GiB``, ``24.70 MiB``, ``1.00 KiB`` or ``12 B``: with the unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} B"
