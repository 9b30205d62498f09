"""A recipe that trains in a second: the fixture ``small``, and for the command line this file's function."""

from dataclasses import replace

from meshrec.optim import RowWiseAdagrad
from meshrec.train import (
    DenseOptimizer,
    DLRMConfig,
    Placement,
    Recipe,
    Schedule,
    SyntheticClicks,
    Training,
)

DATA = SyntheticClicks(
    num_samples=1000, num_validation=400, num_test=300, num_features=3, num_embeddings=50, num_dense=2
)


def small(*, placement=None, **training) -> Recipe:
    return Recipe(
        name="small",
        data=DATA,
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(8,)),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        schedule=Schedule(warmup_steps=2, decay="linear"),
        training=replace(Training(batch_size=100, log_every=5, phases_every=4), **training),
        placement=placement or Placement(),
    )
