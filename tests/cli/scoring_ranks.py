"""What a rank of a pool does in tests of scores: it imports nothing of the tests."""

from meshrec.runs.score_file import write_scores
from meshrec.runs.scoring import gather_scores, load_scorer
from meshrec.train import RunFolder, join


def on_a_rank(run, data, out):
    ranks = join("cpu")
    scorer = load_scorer(RunFolder(run), ranks, data, labelled=False)
    scored = gather_scores(scorer, ranks)
    return write_scores(out, scorer.dataset, scored) if ranks.is_first else list(scored)
