from meshrec.data import Position
from meshrec.train.progress import Progress


def test_epochs_end_at_their_last_sample():
    progress = Progress()
    for num_samples in (60, 40, 60):
        progress.advance(num_samples, 100)
    assert progress.position == Position(1, 60)
    assert (progress.step, progress.num_samples) == (3, 0)  # the trainer counts those that were not skipped
    again = Progress()
    again.load_state_dict(progress.state_dict())
    assert vars(again) == vars(progress)
