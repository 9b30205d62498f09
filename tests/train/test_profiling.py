import gzip
import json

from meshrec.train import RunFolder, Trainer, join


def test_the_trace_names_our_phases(tmp_path, small):
    recipe = small(epochs=2)
    folder = RunFolder(tmp_path)
    Trainer(recipe, recipe.data.load(), join("cpu"), folder=folder, profile=True).run()
    trace = json.loads(gzip.decompress(folder.trace(0).read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    for phase in ("forward", "backward", "optimizer"):
        assert names.count(f"meshrec.{phase}") == 5, phase
