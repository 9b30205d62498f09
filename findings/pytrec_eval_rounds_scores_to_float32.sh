#!/bin/sh
# pytrec_eval-terrier 0.5.11: scores are rounded to float32 before they are sorted, and equal scores are ranked by
# descending document ID, whatever the order in which they were given.
#
# Guess: Python's floats are compared as they are, so a score of 16777217 is ranked above 16777216, and of equal scores
# the document that was given first is first.
# Behavior: both pairs are ties, and "b" is ranked above "a": reciprocal rank 0.5 for the relevant "a". IDs of items or
# times as scores ("most recent first") come out in the order of their names.
# Output seen:
#   16777217 and 16777216: recip_rank 0.5
#   equal: recip_rank 0.5
#   equal, relevant document named c: recip_rank 1.0
# Exits with 1 if that changes. PYTHON names the interpreter; its NumPy is used if it has one.
set -e
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -c 'import numpy' 2>/dev/null || "$PYTHON" -m pip install --quiet --target "$folder" numpy==2.2.6
"$PYTHON" -m pip install --quiet --no-deps --target "$folder" pytrec_eval-terrier==0.5.11
cd "$folder"
PYTHONPATH="$folder" "$PYTHON" - <<'PYEOF'
import sys
from importlib.metadata import version

import pytrec_eval

print("pytrec_eval-terrier", version("pytrec_eval-terrier"))


def reciprocal_rank(relevant, other, scores):
    evaluator = pytrec_eval.RelevanceEvaluator({"query": {relevant: 1, other: 0}}, {"recip_rank"})
    return evaluator.evaluate({"query": dict(zip((relevant, other), scores))})["query"]["recip_rank"]


close = reciprocal_rank("a", "b", (16777217.0, 16777216.0))
equal = reciprocal_rank("a", "b", (1.0, 1.0))
renamed = reciprocal_rank("c", "b", (1.0, 1.0))
print("16777217 and 16777216: recip_rank", close)
print("equal: recip_rank", equal)
print("equal, relevant document named c: recip_rank", renamed)
sys.exit((close, equal, renamed) != (0.5, 0.5, 1.0))
PYEOF
