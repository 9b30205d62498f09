"""Print the table that `make hostile` ends with: what was tried, what held, what failed."""

import json
import sys
from collections import Counter
from pathlib import Path

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
counts = Counter[tuple[str, str]]()  # a row of the table may come from several tests
for row in rows:
    counts.update({(row["what"], column): row[column] for column in ("tried", "held", "failed")})
names = sorted({row["what"] for row in rows})
width = max([4, *map(len, names)])
print(f"{'what':{width}}  {'tried':>7}  {'held':>7}  {'failed':>7}")
for what in names:
    print(f"{what:{width}}  " + "  ".join(f"{counts[what, c]:7d}" for c in ("tried", "held", "failed")))
