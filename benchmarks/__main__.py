"""Run all benchmarks, or those named: `python -m benchmarks [tbe] [import] [--case N] [--quick]`."""

import argparse
import sys
from collections.abc import Callable

from benchmarks import (
    attention,
    balance,
    checkpoint,
    criteo_wall,
    default_model,
    dlrm_step,
    early_bags,
    file_rows,
    hashed_step,
    import_time,
    index,
    inspect_auc,
    kept_histories,
    layouts,
    nbit,
    planner,
    quant_auc,
    reading,
    serve,
    serve_changes,
    serve_hashed,
    serve_hostile,
    serve_mlserver,
    stages,
    tbe,
    train_pipeline,
    trainer,
    wire,
    wire_auc,
)
from benchmarks.harness import Effort, Result, bars_table, save


def run_tbe(arguments: argparse.Namespace, effort: Effort) -> Result:
    return tbe.run(effort, arguments.case or list(tbe.CASES), tiny=arguments.tiny)


def run_attention(arguments: argparse.Namespace, effort: Effort) -> Result:
    return attention.run(effort, tiny=arguments.tiny)


def run_balance(arguments: argparse.Namespace, effort: Effort) -> Result:
    return balance.run(effort, tiny=arguments.tiny)


def run_kept_histories(arguments: argparse.Namespace, effort: Effort) -> Result:
    return kept_histories.run(effort, tiny=arguments.tiny)


def run_nbit(arguments: argparse.Namespace, effort: Effort) -> Result:
    return nbit.run(effort, tiny=arguments.tiny)


def run_quant_auc(arguments: argparse.Namespace, effort: Effort) -> Result:
    return quant_auc.run(tiny=arguments.tiny)


def run_inspect_auc(arguments: argparse.Namespace, effort: Effort) -> Result:
    return inspect_auc.run(tiny=arguments.tiny)


def run_default_model(arguments: argparse.Namespace, effort: Effort) -> Result:
    return default_model.run(tiny=arguments.tiny)


def run_index(arguments: argparse.Namespace, effort: Effort) -> Result:
    return index.run(effort, tiny=arguments.tiny)


def run_hashed_step(arguments: argparse.Namespace, effort: Effort) -> Result:
    return hashed_step.run(effort, arguments.part or hashed_step.PARTS, tiny=arguments.tiny)


def run_import(arguments: argparse.Namespace, effort: Effort) -> Result:
    return import_time.run(effort)


def run_planner(arguments: argparse.Namespace, effort: Effort) -> Result:
    return planner.run(effort, tiny=arguments.tiny)


def run_dlrm_step(arguments: argparse.Namespace, effort: Effort) -> Result:
    return dlrm_step.run(
        effort, tiny=arguments.tiny, only=arguments.only or (), parts=arguments.part or dlrm_step.PARTS
    )


def run_data(arguments: argparse.Namespace, effort: Effort) -> Result:
    return reading.run(effort, tiny=arguments.tiny)


def run_trainer(arguments: argparse.Namespace, effort: Effort) -> Result:
    return trainer.run(effort, tiny=arguments.tiny)


def run_criteo_wall(arguments: argparse.Namespace, effort: Effort) -> Result:
    return criteo_wall.run(effort, tiny=arguments.tiny)


def run_checkpoint(arguments: argparse.Namespace, effort: Effort) -> Result:
    return checkpoint.run(effort, tiny=arguments.tiny)


def run_file_rows(arguments: argparse.Namespace, effort: Effort) -> Result:
    return file_rows.run(effort, arguments.part or file_rows.PARTS, tiny=arguments.tiny)


def run_stages(arguments: argparse.Namespace, effort: Effort) -> Result:
    return stages.run(effort, tiny=arguments.tiny)


def run_layouts(arguments: argparse.Namespace, effort: Effort) -> Result:
    return layouts.run(effort, tiny=arguments.tiny)


def run_train_pipeline(arguments: argparse.Namespace, effort: Effort) -> Result:
    return train_pipeline.run(effort, tiny=arguments.tiny)


def run_early_bags(arguments: argparse.Namespace, effort: Effort) -> Result:
    return early_bags.run(effort, tiny=arguments.tiny)


def run_serve(arguments: argparse.Namespace, effort: Effort) -> Result:
    return serve.run(effort, tiny=arguments.tiny)


def run_serve_changes(arguments: argparse.Namespace, effort: Effort) -> Result:
    return serve_changes.run(effort, tiny=arguments.tiny)


def run_serve_hashed(arguments: argparse.Namespace, effort: Effort) -> Result:
    return serve_hashed.run(effort, tiny=arguments.tiny)


def run_serve_hostile(arguments: argparse.Namespace, effort: Effort) -> Result:
    return serve_hostile.run(effort, tiny=arguments.tiny, only=arguments.only or ())


def run_serve_mlserver(arguments: argparse.Namespace, effort: Effort) -> Result:
    return serve_mlserver.run(effort, tiny=arguments.tiny)


def run_wire(arguments: argparse.Namespace, effort: Effort) -> Result:
    return wire.run(effort, tiny=arguments.tiny)


def run_wire_auc(arguments: argparse.Namespace, effort: Effort) -> Result:
    return wire_auc.run(tiny=arguments.tiny)


BENCHES: dict[str, Callable[[argparse.Namespace, Effort], Result]] = {
    "tbe": run_tbe,
    "attention": run_attention,
    "balance": run_balance,
    "kept_histories": run_kept_histories,
    "nbit": run_nbit,
    "quant_auc": run_quant_auc,
    "inspect_auc": run_inspect_auc,
    "default_model": run_default_model,
    "import": run_import,
    "index": run_index,
    "hashed_step": run_hashed_step,
    "planner": run_planner,
    "dlrm_step": run_dlrm_step,
    "data": run_data,
    "trainer": run_trainer,
    "criteo_wall": run_criteo_wall,
    "checkpoint": run_checkpoint,
    "file_rows": run_file_rows,
    "stages": run_stages,
    "layouts": run_layouts,
    "train_pipeline": run_train_pipeline,
    "early_bags": run_early_bags,
    "serve": run_serve,
    "serve_changes": run_serve_changes,
    "serve_hashed": run_serve_hashed,
    "serve_hostile": run_serve_hostile,
    "serve_mlserver": run_serve_mlserver,
    "wire": run_wire,
    "wire_auc": run_wire_auc,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Verify, then time.")
    parser.add_argument("bench", nargs="*", help=f"{', '.join(BENCHES)}; all of them when none is named")
    parser.add_argument("--case", type=int, action="append", choices=list(tbe.CASES), help="a case of tbe")
    parser.add_argument(
        "--only",
        action="append",
        help="contenders of dlrm_step or ways of serve_hostile whose name contains this: table_wise, silent",
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=[*dlrm_step.PARTS, *hashed_step.PARTS, *file_rows.PARTS],
        help="a part of dlrm_step, hashed_step or file_rows",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: noisier")
    parser.add_argument("--tiny", action="store_true", help="tiny tables: only tries the benches themselves")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.bench if name not in BENCHES]
    if unknown:
        parser.error(f"no bench is called {unknown[0]!r}; there are {', '.join(BENCHES)}")
    return arguments


def main() -> int:
    """Run the benchmarks named on the command line; return 1 if a bar is missed."""
    arguments = parse()
    effort = Effort(rounds=2, calls=1) if arguments.quick or arguments.tiny else Effort()
    missed = 0
    for name in arguments.bench or list(BENCHES):
        print(f"== {name}", flush=True)
        result = BENCHES[name](arguments, effort)
        if arguments.tiny:
            print("verified; the times of tiny tables say nothing\n")
            continue
        print(f"{bars_table(result.bars)}\n\n{save(name, result)}\n", flush=True)
        missed += sum(not bar.met for bar in result.bars)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
