"""Mistakes that people make on the command line, each with what they would type next.

They are typed in a folder with ``clicks.csv``, ``clicks.parquet``, ``other.csv`` (without users),
``bad.csv`` (one
label is missing), ``new.csv`` (no labels), ``users.csv``, ``text.txt``, ``recipe.py`` and ``recipe.yaml``, a
run ``a``, its package ``pack``, ``plan.json``, and a run ``s`` of next items.
"""

import shlex
from typing import NamedTuple


class Mistake(NamedTuple):
    """A command, a part of the message that it gets, and the command that the message leads to."""

    typed: str
    said: str
    remedy: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.typed)


T = "train recipe.py:recipe --quiet --training.epochs 1"
I = "inspect clicks.csv --label clicked --out made.py --force"  # noqa: E741
E = "evaluate a --data clicks.csv"
P = "predict a --data new.csv --out scores.csv --force"
X = "export a --no-compile --out package"
Q = "quantize a --out small"
M = "embed a --feature user --out vectors.parquet --force"
L = "plan recipe.py:recipe --ranks 2"
B = "leaderboard clicks.csv --label clicked --force"
C = "explain a --data users.csv --background new.csv --orders 1 --out parts.csv --force"
R = "recommend s --users users.csv --out recs.csv --force"
S = "similar s --items 3 --out similar.csv --force"
U = "tune recipe.py:recipe --trials 1 --training.epochs 1"

MISTAKES = [
    Mistake(*row)
    for row in (
        # the command
        ("trian recipe.py:recipe", "Did you mean train?", T),
        ("Runs", "Did you mean runs?", "runs"),
        ("--verison", "there is no option '--verison'", "--version"),
        # train: the recipe
        ("train recipee.py:recipe", "Did you mean recipe.py?", T),
        ("train recipe.py:recipes", "Did you mean recipe?", T),
        ("train movielens_dlmr", "Did you mean movielens_dlrm?", "train movielens_dlrm --help"),
        ("train --quiet", "the recipe is missing", T),
        # train: options
        (f"{T} --epochs 2", "--training.epochs INT", f"{T} --training.epochs 2"),
        (f"{T} --epoch 2", "--training.epochs INT", f"{T} --training.epochs 2"),
        (f"{T} --trainng.epochs 2", "--training.epochs INT", f"{T} --training.epochs 2"),
        (f"{T} --lr 0.1", "--tables.lr FLOAT", f"{T} --tables.lr 0.1"),
        (f"{T} --training.epochs two", "'two'", f"{T} --training.epochs 4"),
        (f"{T} --tables.lr fast", "'fast'", f"{T} --tables.lr 0.01"),
        (f"{T} --training.epochs", "--training.epochs", f"{T} --training.epochs 1"),
        (f"{T} --training.epochs 0", "must be at least 1", f"{T} --training.epochs 1"),
        (f"{T} --training.pipeline yes", "yes", f"{T} --training.pipeline"),
        (f"{T} --training.clip-norm -1", "it must be above 0", f"{T} --training.clip-norm 1"),
        (
            f"{T} --model.layers 32,16",
            "'32,16'",
            f"{T} --model.layers 32 16",
        ),
        (f"{T} --dense.kind adamm", "'adam'", f"{T} --dense.kind adam"),
        (f"{T} --schedule.decay cosin", "'cosine'", f"{T} --schedule.decay cosine"),
        (f"{T} --table-optimizer addam", "Did you mean Adam?", f"{T} --table-optimizer Adam"),
        (f"{T} --loss.positive-weight 0", "it must be above 0", f"{T} --loss.positive-weight 2"),
        (f"{T} --data.on-error ignore", "'raise', 'skip'", f"{T} --data.on-error skip"),
        (f"{T} --data.train clicks.cvs", "clicks.cvs stands for no file", f"{T} --data.train clicks.csv"),
        (f"{T} --data.train other.csv", "there is no column 'user'", f"{T} --data.train clicks.csv"),
        (f"{T} --data.split-column whem", "Did you mean when?", f"{T} --data.split-column when"),
        (f"{T} --placement.wire fp8", "fp32, fp16", f"{T} --placement.wire fp16"),
        (f"{T} --placement.hardware a1000", "'cpu'", f"{T} --placement.hardware cpu"),
        (f"{T} --placement.plan none.json", "none.json", f"{T} --placement.plan runs/a/plan.json"),
        (f"{T} --placement.sharding-types row-wise", "row_wise", f"{T} --placement.sharding-types row_wise"),
        # train: the run
        (f"{T} --nproc 0", "--nproc is 0; it must be at least 1", f"{T} --nproc 1"),
        (f"{T} --nproc 2 --training.batch-size 33", "take 32 or 34", f"{T} --training.batch-size 34"),
        (f"{T} --nproc two", "'two'", f"{T} --nproc 1"),
        (f"{T} --device gpu", "take cpu or cuda", f"{T} --device cpu"),
        (f"{T} --name a", "use another --name", f"{T} --name another"),
        (f"{T} --name x/y", "a run's name is the name of its folder", f"{T} --name x-y"),
        (f"{T} --rank-timeout 0", "it must be above 0 seconds", f"{T} --rank-timeout 60"),
        (f"{T} --track mlfow", "mlflow", T),
        (f"{T} --placement.no-sharded --nproc 2", "Take --nproc 1", f"{T} --placement.no-sharded --nproc 1"),
        (
            f"{T} --placement.no-sharded --training.publish-every 1",
            "Leave placement.sharded True",
            f"{T} --training.publish-every 1",
        ),
        ("train --resume", "name the run to resume (--name RUN)", "train --resume --name a"),
        ("train --resume --name b", "There are: a", "train --resume --name a"),
        (
            "train recipe.py:recipe --resume --name a --model.embedding-dim 4",
            "cannot become 4",
            "train --resume --name a",
        ),
        # inspect
        ("inspect clicks.csv", "neither --label nor a log is given. Give --label", I),
        ("inspect --label clicked --force", "DATA", I),
        ("inspect click.csv --label clicked --force", "click.csv stands for no file", I),
        ("inspect clicks.csv --label click --force", "Did you mean clicked?", I),
        ("inspect clicks.csv --label user --task binary --force", "a binary label has two", I),
        ("inspect clicks.csv --label clicked --query usr --force", "Did you mean user?", f"{I} --query user"),
        (f"{I} --task regression", "Expected one of", f"{I} --task number"),
        (f"{T} --dense.optimizer adam", "--dense.optimizer", f"{T} --dense.kind adam"),
        (f"{T} --model.layers", "--model.layers", f"{T} --model.layers 16 8"),
        (f"{I} --query user --task classes", "Leave --task out", f"{I} --query user"),
        (f"{E} --by", "--by", f"{E} --by country"),
        (f"{P} --keep", "--keep", f"{P} --keep user"),
        (f"{T} --model.members 0", "must be at least 1", f"{T} --model.members 4"),
        (f"{T} --model.dropout 1", "must be in [0, 1)", f"{T} --model.dropout 0.5"),
        ("leaderboard clicks.csv", "--label", f"{B} --epochs 1"),
        (f"{B} --models bert", "take some of wide_deep", f"{B} --models dlrm --epochs 1"),
        (f"{B} --epochs 0", "must be at least 1", f"{B} --epochs 1"),
        ("inspect clicks.csv --label clicked --time whem --force", "Did you mean when?", f"{I} --time when"),
        ("inspect clicks.csv --label clicked --time country --force", "holds text", f"{I} --time when"),
        (
            "inspect clicks.csv --label clicked",
            "recipe.py is there already",
            "inspect clicks.csv --label clicked --out new.py",
        ),
        ("inspect clicks.csv --label clicked --out none/recipe.py", "Make it first", I),
        ("inspect text.txt --label clicked --force", "end in .csv", I),
        ("inspect clicks.csv other.csv --label clicked --force", "differ in ['user']", I),
        ("inspect clicks.csv clicks.parquet --label clicked --force", "Give files of one kind", I),
        (f"{I} --rows 0", "it must be at least 1", f"{I} --rows 100"),
        # evaluate
        ("evaluate b --data clicks.csv", "there are: a, s", E),
        ("evaluate a", "--data", E),
        ("evaluate --data clicks.csv", "RUN", E),
        ("evaluate a --data click.csv", "click.csv stands for no file", E),
        ("evaluate a --data other.csv", "there is no column 'user'", E),
        ("evaluate a --data new.csv", "there is no column 'clicked'", E),
        ("evaluate a --data bad.csv", "--on-error skip", f"{E} --on-error skip"),
        (f"{E} --by contry", "Did you mean country?", f"{E} --by country"),
        (f"{E} --group usr", "Did you mean user?", f"{E} --group user"),
        (f"{E} --intervals 1", "200", f"{E} --intervals 200"),
        (f"{E} --step 99", "99", f"{E} --last"),
        (f"{E} --json none/metrics.json", "Make it first", f"{E} --json metrics.json"),
        # predict
        ("predict a --data new.csv", "--out", P),
        ("predict a --data new.csv --out scores.txt", ".parquet or .csv", P),
        ("predict a --data new.csv --out clicks.csv", "is there already", P),
        ("predict a --data new.csv --out none/scores.csv", "Make it first", P),
        ("predict a --data other.csv --out s.csv", "there is no column 'user'", P),
        (f"{P} --keep usr", "Did you mean user?", f"{P} --keep user"),
        # explain
        ("explain a", "--data", C),
        ("explain a --data new.cvs", "new.cvs stands for no file", C),
        ("explain a --data other.csv", "there is no column 'user'", C),
        ("explain a --data users.csv --background other.csv", "there is no column 'user'", C),
        ("explain s --data users.csv", "no columns of their own to explain", C),
        (f"{C} --num-orders 1", "--orders INT", f"{C} --orders 2"),
        (f"{C} --orders 0", "must be at least 1", C),
        ("explain a --data users.csv --out parts.txt", ".parquet or .csv", C),
        # recommend, similar
        ("recommend s --users users.csv", "--out", R),
        ("recommend a --out recs.csv --force", "a log of users, items and times", R),
        ("recommend s --users user.csv --out r.csv", "user.csv stands for no file", R),
        ("recommend s --users other.csv --out r.csv", "no users in a column 'user'", R),
        ("recommend s --data other.csv --out r.csv", "there is no column 'user'", f"{R} --data clicks.csv"),
        ("recommend s --users users.csv --out recs.txt", ".parquet or .csv", R),
        (f"{R} -k 0", "-k is 0; it must be at least 1", f"{R} -k 5"),
        (f"{R} --keep-seen --new-only", "Leave one of them out", f"{R} --new-only"),
        ("similar b --items 3", "there are: a, s", S),
        ("similar a --items 3", "a log of users, items and times", S),
        ("similar s --items 999", "999", S),
        ("similar s --items i3", "Give them as they are there", S),
        ("similar s --item 3", "--items STR", S),
        (f"{S} -k 0", "must be at least 1", f"{S} -k 5"),
        ("similar s --items 3 --out similar.txt", ".parquet or .csv", S),
        ("predict s --data new.csv --out s.csv", "`meshrec recommend`", R),
        # runs
        ("runs compare a", "name two runs or more", "runs compare a a"),
        ("runs compare a b", "there are: a, s", "runs compare a a"),
        ("runs compair a a", "Did you mean compare?", "runs compare a a"),
        ("runs rm b", "there are: a, s", "runs"),
        ("runs --state done", "Expected one of", "runs --state finished"),
        ("runs --sort test-auc", "Expected one of", "runs --sort test"),
        ("runs --recipe recipes", "leave --state or --recipe out", "runs"),
        ("runs --runs nowhere", "meshrec train RECIPE", "runs --runs runs"),
        # checkpoint
        ("checkpoint", "inspect, verify, export, import", "checkpoint inspect a"),
        ("checkpoint inspct a", "inspect, verify, export, import", "checkpoint inspect a"),
        ("checkpoint inspect b", "b", "checkpoint inspect a"),
        ("checkpoint export a", "FILE", "checkpoint export a weights.safetensors"),
        (
            "checkpoint export a w.safetensors --to onnx",
            "Leave --to out",
            "checkpoint export a w.safetensors",
        ),
        # export, serve, quantize, embed
        ("export a --out pack", "pack", X),
        ("export b --out package", "there are: a, s", X),
        ("export a", "--out", X),
        ("export a --out p --items clicks.csv", "--tower item", X),
        ("serve a", "meshrec export", X),
        ("serve pack --port eighty", "'eighty'", "serve --help"),
        ("serve pack --deltas other=a", "with the name of a model", "serve --help"),
        (f"{Q} --weights int8", "'INT8'", f"{Q} --weights INT8"),
        (f"{Q} --max-loss little", "0.02%", f"{Q}er --max-loss 5%"),
        ("embed a --feature usr --out e.parquet", "Did you mean user?", M),
        ("embed a --feature user --out e.txt", ".parquet", M),
        # YAML
        ("recipe recipe.py:recipe", "to-yaml", "recipe to-yaml recipe.py:recipe"),
        (
            "train reciple.yaml --quiet",
            "Did you mean recipe.yaml?",
            "train recipe.yaml --quiet --training.epochs 1",
        ),
        # plan, tune, delta, calibrate
        ("plan b", "b is neither", L),
        ("plan recipe.py:recipe --ranks 0", "it must be at least 1", L),
        ("plan recipe.py:recipe --what-if 16", "ranks=16,32,64", f"{L} --what-if ranks=2,4"),
        ("plan --diff plan.json", "--diff", "plan --diff plan.json plan.json"),
        ("plan plan.json --ranks 4", "leave --ranks out", "plan plan.json"),
        ("plan --compare b", "b", "plan a"),
        ("tune", "RECIPE is missing", U),
        (f"{U} --space tables.lr", "tables.lr=1e-4..1e-1:log", f"{U} --space tables.lr=1e-3..1e-2:log"),
        (f"{U} --space table.lr=1e-3..1e-2", "Did you mean tables.lr?", f"{U} --space tables.lr=1e-3..1e-2"),
        ("tune recipe.py:recipe --trials 0", "Take 1 or more, or --seeds", U),
        ("delta verify a", "--training.publish-every", "delta --help"),
        ("delta a", "verify", "delta --help"),
        ("calibrate none/here.json", "Make it first", "calibrate --help"),
    )
]
