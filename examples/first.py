import torch

import meshrec
from meshrec.optim import RowWiseAdagrad

NUM_USERS, NUM_MOVIES, BATCH = 100, 1000, 256
torch.manual_seed(0)
liked = torch.rand(NUM_MOVIES) < 0.5  # the truth to be learned: some movies are liked, the others are not

ebc = meshrec.EmbeddingBagCollection(
    tables=[
        meshrec.EmbeddingBagConfig(
            name="users", embedding_dim=16, num_embeddings=NUM_USERS, feature_names=["user"]
        ),
        meshrec.EmbeddingBagConfig(
            name="movies", embedding_dim=16, num_embeddings=NUM_MOVIES, feature_names=["movie"]
        ),
    ]
)
# Both tables update themselves in the backward pass; only the dense layer needs a step.
fused = meshrec.fuse(ebc, optimizer=RowWiseAdagrad(lr=0.02))
dense = torch.nn.Linear(32, 1)
optimizer = torch.optim.Adam(dense.parameters(), lr=0.02)

for step in range(200):
    users = torch.randint(0, NUM_USERS, (BATCH,))
    movies = torch.randint(0, NUM_MOVIES, (BATCH,))
    features = meshrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["user", "movie"],
        values=torch.cat([users, movies]),
        lengths=torch.ones(2 * BATCH, dtype=torch.int64),
    )
    logits = dense(fused(features).values()).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, liked[movies].float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == 199:
        print(f"step {step:3d}  loss {loss.item():.3f}")
