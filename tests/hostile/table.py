"""Print the table that `make hostile` ends with: what was tried, what held, what failed."""

import json
import sys
from pathlib import Path

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
width = max([4, *(len(row["what"]) for row in rows)])
print(f"{'what':{width}}  {'tried':>7}  {'held':>7}  {'failed':>7}")
for row in sorted(rows, key=lambda row: row["what"]):
    print(f"{row['what']:{width}}  {row['tried']:7d}  {row['held']:7d}  {row['failed']:7d}")
