"""Run all benchmarks, or those named: `python -m benchmarks [tbe] [nbit] [--only PART] [--quick]`."""

import argparse
import importlib
import inspect
import sys

from benchmarks.harness import Effort, Result, bars_table, save

# Name on the command line: module, whose `run(effort, ...)` verifies its results before it times.
BENCHES = {
    "tbe": "tbe",
    "nbit": "nbit",
    "dlrm_step": "dlrm_step",
    "host": "host",
    "two_hosts": "two_hosts",
    "train_pipeline": "train_pipeline",
    "hashed_step": "hashed_step",
    "file_rows": "file_rows",
    "planner": "planner",
    "checkpoint": "checkpoint",
    "data": "reading",
    "default_model": "default_model",
    "new_users": "new_users",
    "serve": "serve",
    "serve_hostile": "serve_hostile",
    "stream": "stream",
    "wire": "wire",
    "wire_auc": "wire_auc",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Verify, then time.")
    parser.add_argument("bench", nargs="*", help=f"{', '.join(BENCHES)}; all of them when none is named")
    parser.add_argument(
        "--only", action="append", help="a part of a bench, of those that have parts; or a part of its name"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: noisier")
    parser.add_argument("--tiny", action="store_true", help="tiny tables: only tries the benches themselves")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.bench if name not in BENCHES]
    if unknown:
        parser.error(f"no bench is called {unknown[0]!r}; there are {', '.join(BENCHES)}")
    return arguments


def run(name: str, arguments: argparse.Namespace, effort: Effort) -> Result:
    """Run one benchmark with the options that it has."""
    module = importlib.import_module(f"benchmarks.{BENCHES[name]}")
    options = {"effort": effort, "tiny": arguments.tiny, "only": arguments.only}
    known = inspect.signature(module.run).parameters
    result: Result = module.run(**{key: value for key, value in options.items() if key in known and value})
    return result


def main() -> int:
    """Run the benchmarks named on the command line; return 1 if a bar is missed."""
    arguments = parse()
    effort = Effort(rounds=2, calls=1) if arguments.quick or arguments.tiny else Effort()
    missed = 0
    for name in arguments.bench or list(BENCHES):
        print(f"== {name}", flush=True)
        result = run(name, arguments, effort)
        if arguments.tiny:
            print("verified; the times of tiny tables say nothing\n")
            continue
        print(f"{bars_table(result.bars)}\n\n{save(name, result)}\n", flush=True)
        missed += sum(not bar.met for bar in result.bars)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
