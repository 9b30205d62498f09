#!/bin/sh
# implicit 0.7.3: precision of ranking_metrics_at_k is hits over min(K, relevant items), summed over all users before
# the division, so it is neither precision@K nor a mean over users.
#
# Guess: hits / K for each user, then the mean over users. One of two users has 1 relevant item, at position 1 of 10;
# the other has 10, none in the first 10: precision@10 = (1/10 + 0/10) / 2 = 0.05. One user whose 2 relevant items are
# both in the first 10: 0.2.
# Behavior: (1 + 0) / (1 + 10) = 0.0909 and 2 / 2 = 1. map, ndcg and auc of the same call are means over users.
# Output seen:
#   two users: precision 0.0909 map 0.5000 ndcg 0.5000 auc 0.5000
#   one user:  precision 1.0000
# Exits with 1 if that changes. PYTHON names the interpreter; its NumPy and SciPy are used if it has both.
set -e
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -c 'import numpy, scipy' 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --target "$folder" numpy==2.2.6 scipy==1.15.3
"$PYTHON" -m pip install --quiet --no-deps --target "$folder" implicit==0.7.3 tqdm==4.70.1 threadpoolctl==3.6.0
cd "$folder"
PYTHONPATH="$folder" "$PYTHON" - <<'PYEOF'
import sys

import implicit
import numpy
import scipy.sparse
from implicit.evaluation import ranking_metrics_at_k

print("implicit", implicit.__version__)
ITEMS, K = 20, 10


class InOrder:
    """Recommends items 0, 1, 2, ... to every user."""

    def recommend(self, users, rows, N=10, **options):
        items = numpy.tile(numpy.arange(N, dtype=numpy.int32), (len(users), 1))
        return items, numpy.zeros(items.shape, dtype=numpy.float32)


def metrics(relevant):
    held_out = numpy.zeros((len(relevant), ITEMS))
    for user, items in enumerate(relevant):
        held_out[user, items] = 1
    train, test = scipy.sparse.csr_matrix(held_out.shape), scipy.sparse.csr_matrix(held_out)
    return ranking_metrics_at_k(InOrder(), train, test, K=K, show_progress=False)


two, one = metrics([[0], list(range(10, 20))]), metrics([[0, 3]])
print("two users:", *(f"{name} {value:.4f}" for name, value in two.items()))
print("one user:  precision", f"{one['precision']:.4f}")
as_seen = abs(two["precision"] - 1 / 11) < 1e-9 and two["ndcg"] == 0.5 and one["precision"] == 1
sys.exit(not as_seen)
PYEOF
