"""Embedding tables and their optimizers in plain torch, in float64: it shares no code with the package."""

import itertools
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
            lengths = torch.randint(0, case["longest"] + 1, (BATCH,), generator=generator).tolist()
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
    return stored(table, 0.1 + torch.rand(table["rows"], table["dim"], generator=generator))


def stored(table, weight):
    """As the table's type can hold it."""
    return weight.to(getattr(torch, table["dtype"])).to(weight.dtype)


def rate_factor(case, step):
    """What a schedule makes of the learning rate."""
    return 1.0 - 0.3 * (step % 3) if case["schedule"] else 1.0


def shares(case, step, world_size):
    """Where each rank's samples begin and end."""
    if case["even"]:
        cuts = range(0, BATCH + 1, BATCH // world_size)
    else:
        generator = torch.Generator().manual_seed(case["seed"] * 1000 + 700 + step)
        inner = torch.randint(0, BATCH + 1, (world_size - 1,), generator=generator)
        cuts = [0, *inner.sort().values.tolist(), BATCH]
    return list(itertools.pairwise(cuts))


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
        """One step; gives the outputs of all samples, by (table, feature), and gradients of weights of ids,
        by feature.
        """
        self.step += 1
        bags, output_gradients = inputs(self.case, step)
        weights_of_ids = {}
        if self.case["weighted"]:
            of_tables = {f for t in self.case["tables"] if t["collection"] == "ebc" for f in t["features"]}
            weights_of_ids = {
                feature: torch.cat([weights for _, weights in bags[feature]]).double().requires_grad_()
                for feature in of_tables
            }
            for feature, whole in weights_of_ids.items():
                parts = whole.split([len(ids) for ids, _ in bags[feature]])
                bags[feature] = [(ids, part) for (ids, _), part in zip(bags[feature], parts, strict=True)]
        outputs, loss, touched = {}, torch.zeros((), dtype=torch.float64), {}
        for table in self.case["tables"]:
            weight = self.weights[table["name"]].requires_grad_()
            touched[table["name"]] = []
            for feature in table["features"]:
                out = torch.cat([self._looked_up(table, weight, *bag) for bag in bags[feature]])
                outputs[table["name"], feature] = out.detach()
                loss = loss + (out * output_gradients[table["name"], feature]).sum()
                touched[table["name"]] += [ids for ids, _ in bags[feature]]
        loss.backward()
        if not self.case["own_batches"]:  # else they come in another order
            outputs |= {feature: weights.grad for feature, weights in weights_of_ids.items()}
        gradients = {}
        for name, weight in self.weights.items():
            gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad / world_size
            weight.requires_grad_(False).grad = None
        if self.case["clip"] is not None:
            total = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
            for gradient in gradients.values():
                gradient *= min(1.0, self.case["clip"] / (total + 1e-6))
        for table in self.case["tables"]:
            name = table["name"]
            rows = torch.cat(touched[name]).unique()
            self._update(table, rows, gradients[name][rows], rate_factor(self.case, step))
            self.weights[name] = stored(table, self.weights[name])
        return outputs

    def _looked_up(self, table, weight, ids, weights):
        found = weight[ids]
        if table["collection"] == "ec":
            return found
        if self.case["weighted"]:
            found = found * weights[:, None]
        pooled = found.sum(0, keepdim=True)
        return pooled / max(len(ids), 1) if table["mean"] else pooled

    def _update(self, table, rows, g, rate_factor):
        name, numbers = table["optimizer"]["name"], table["optimizer"]
        lr, decay, decoupled = numbers["lr"] * rate_factor, numbers["weight_decay"], numbers["decoupled"]
        weight, state = self.weights[table["name"]], self.state[table["name"]]

        def slot(key, *, per_row=False, initial=0.0):
            size = weight.shape[:1] if per_row else weight.shape
            return state.setdefault(key, torch.full(size, initial, dtype=torch.float64))

        def moments(g, *, per_row):
            b1, b2 = numbers["betas"]
            m, v = slot("exp_avg"), slot("exp_avg_sq", per_row=per_row)
            m[rows] = b1 * m[rows] + (1 - b1) * g
            v[rows] = b2 * v[rows] + (1 - b2) * (g.square().mean(1) if per_row else g.square())
            second = v[rows][:, None] if per_row else v[rows]
            mean = m[rows] / (1 - b1**self.step)
            return mean / ((second / (1 - b2**self.step)).sqrt() + EPS)

        w = weight[rows]
        if name != "LARS" and not decoupled:
            g = g + decay * w
        shrunk = w * (1 - lr * decay) if decoupled and "LAMB" not in name else w
        if name == "SGD":
            weight[rows] = shrunk - lr * g
        elif name in ("Adagrad", "RowWiseAdagrad"):
            per_row = name == "RowWiseAdagrad"
            total = slot("sum", per_row=per_row, initial=numbers["initial"])
            total[rows] += g.square().mean(1) if per_row else g.square()
            scale = total[rows][:, None] if per_row else total[rows]
            weight[rows] = shrunk - lr * g / (scale.sqrt() + EPS)
        elif name in ("Adam", "PartialRowWiseAdam"):
            weight[rows] = shrunk - lr * moments(g, per_row=name != "Adam")
        elif name in ("LAMB", "PartialRowWiseLAMB"):
            r = moments(g, per_row=name != "LAMB") + (decay * w if decoupled else 0)
            weight[rows] = w - lr * w.norm(dim=1, keepdim=True) / r.norm(dim=1, keepdim=True) * r
        elif name == "FTRL":
            n, z, own = slot("sum", initial=numbers["initial"]), slot("linear"), numbers["ftrl"]
            before = n[rows].sqrt()
            n[rows] += g.square()
            after = n[rows].sqrt()
            z[rows] += g - (after - before) / lr * w
            over = (z[rows].abs() - own["l1"]).clamp(min=0)
            weight[rows] = -z[rows].sign() * over / ((own["beta"] + after) / lr + own["l2"])
        else:
            assert name == "LARS"
            decay = 0 if decoupled else decay
            norm = w.norm(dim=1, keepdim=True)
            local = lr * TRUST * norm / (g.norm(dim=1, keepdim=True) + decay * norm + EPS)
            m = slot("momentum_buffer")
            m[rows] = numbers["momentum"] * m[rows] + local * (g + decay * w)
            weight[rows] = shrunk - m[rows]
        assert all(math.isfinite(value) for value in weight.sum(0).tolist())


EPS, TRUST = 1e-4, 0.1
