"""Embedding tables and their optimizers in plain torch, in float64: it shares no code with the package."""

import math

import torch

BATCH = 4


def inputs(case, step):
    """For each feature its bags, as lists of (ids, weights of ids), and for each use its gradient.

    All of a step's samples, on whatever number of ranks: the gradient is of ordinary size and of one sign, as
    adaptive optimizers amplify the rounding of tiny ones.
    """
    generator = torch.Generator().manual_seed(case["seed"] * 1000 + step)

    def uniform(*size):
        return 0.5 + torch.rand(*size, generator=generator)

    bags, gradients = {}, {}
    for collection in ("ebc", "ec"):
        tables = [table for table in case["tables"] if table["collection"] == collection]
        for feature in sorted({feature for table in tables for feature in table["features"]}):
            rows = min(table["rows"] for table in tables if feature in table["features"])
            lengths = torch.randint(0, 4, (BATCH,), generator=generator).tolist()
            bags[feature] = [
                (torch.randint(0, rows, (length,), generator=generator), uniform(length))
                for length in lengths
            ]
        for table in tables:
            for feature in table["features"]:
                size = BATCH if collection == "ebc" else sum(len(ids) for ids, _ in bags[feature])
                gradients[table["name"], feature] = uniform(size, table["dim"])
    return bags, gradients


def first_weights(case, table, *, fresh=False):
    generator = torch.Generator().manual_seed(case["seed"] * 1000 + 500 + table["number"] + 100 * fresh)
    return 0.1 + torch.rand(table["rows"], table["dim"], generator=generator)


class Reference:
    """The tables of a case and what they have learned."""

    def __init__(self, case):
        self.case, self.step = case, 0
        self.weights = {t["name"]: first_weights(case, t).double() for t in case["tables"]}
        self.state = {t["name"]: {} for t in case["tables"]}

    def copy(self):
        other = Reference(self.case)
        other.step = self.step
        other.weights = {name: weight.clone() for name, weight in self.weights.items()}
        other.state = {
            name: {slot: value.clone() for slot, value in slots.items()} for name, slots in self.state.items()
        }
        return other

    def train(self, step, world_size):
        """One step; gives the outputs of all samples, by (table, feature)."""
        self.step += 1
        bags, gradients = inputs(self.case, step)
        outputs = {}
        for table in self.case["tables"]:
            weight = self.weights[table["name"]].requires_grad_()
            loss, touched = torch.zeros(()), []
            for feature in table["features"]:
                out = torch.cat([self._looked_up(table, weight, *bag) for bag in bags[feature]])
                outputs[table["name"], feature] = out.detach()
                loss = loss + (out * gradients[table["name"], feature]).sum() / world_size
                touched += [ids for ids, _ in bags[feature]]
            (gradient,) = torch.autograd.grad(loss, [weight], allow_unused=True)
            rows = torch.cat(touched).unique()
            weight.requires_grad_(False)
            self._update(table, rows, None if gradient is None else gradient[rows])
        return outputs

    def _looked_up(self, table, weight, ids, weights):
        found = weight[ids]
        if table["collection"] == "ec":
            return found
        if self.case["weighted"]:
            found = found * weights[:, None]
        pooled = found.sum(0, keepdim=True)
        return pooled / max(len(ids), 1) if table["mean"] else pooled

    def _update(self, table, rows, g):
        name, numbers = table["optimizer"]["name"], table["optimizer"]
        lr, decay, decoupled = numbers["lr"], numbers["weight_decay"], numbers["decoupled"]
        weight, state = self.weights[table["name"]], self.state[table["name"]]

        def slot(key, *, per_row):
            size = weight.shape[:1] if per_row else weight.shape
            return state.setdefault(key, torch.zeros(size, dtype=torch.float64))

        def moments(g, *, per_row):
            b1, b2 = 0.9, 0.999
            m, v = slot("exp_avg", per_row=False), slot("exp_avg_sq", per_row=per_row)
            m[rows] = b1 * m[rows] + (1 - b1) * g
            v[rows] = b2 * v[rows] + (1 - b2) * (g.square().mean(1) if per_row else g.square())
            second = v[rows][:, None] if per_row else v[rows]
            mean = m[rows] / (1 - b1**self.step)
            return mean / ((second / (1 - b2**self.step)).sqrt() + EPS)

        if g is None:
            g = weight[rows]  # of no rows
        w = weight[rows]
        if name != "LARS" and not decoupled:
            g = g + decay * w
        shrunk = w * (1 - lr * decay) if decoupled and "LAMB" not in name else w
        if name == "SGD":
            weight[rows] = shrunk - lr * g
        elif name in ("Adagrad", "RowWiseAdagrad"):
            per_row = name == "RowWiseAdagrad"
            total = slot("sum", per_row=per_row)
            total[rows] += g.square().mean(1) if per_row else g.square()
            scale = total[rows][:, None] if per_row else total[rows]
            weight[rows] = shrunk - lr * g / (scale.sqrt() + EPS)
        elif name in ("Adam", "PartialRowWiseAdam"):
            weight[rows] = shrunk - lr * moments(g, per_row=name != "Adam")
        elif name in ("LAMB", "PartialRowWiseLAMB"):
            r = moments(g, per_row=name != "LAMB") + (decay * w if decoupled else 0)
            weight[rows] = w - lr * w.norm(dim=1, keepdim=True) / r.norm(dim=1, keepdim=True) * r
        else:
            assert name == "LARS"
            decay = 0 if decoupled else decay
            norm = w.norm(dim=1, keepdim=True)
            local = lr * TRUST * norm / (g.norm(dim=1, keepdim=True) + decay * norm + EPS)
            m = slot("momentum_buffer", per_row=False)
            m[rows] = 0.9 * m[rows] + local * (g + decay * w)
            weight[rows] = shrunk - m[rows]
        assert all(math.isfinite(value) for value in weight.sum(0).tolist())


EPS, TRUST = 1e-4, 0.1
