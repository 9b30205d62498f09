"""Run TorchRec's own unit tests, from a checkout of TorchRec, through the bridge.

    python peer_tests.py /path/to/checkout [--original] [--only NAME ...] [--out FILE]

Their tests and their helper files come from the checkout, all else is the bridge's. With ``--original``, it
is the checkout's: the tests that pass there are those that count.
"""

import argparse
import json
import sys
import unittest
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDERS = ("fx", "inference", "models", "modules", "optim", "quant", "sparse")


class Placeholder(ModuleType):
    """A module or a name that the bridge lacks. A test may import it, and fails where it uses it."""

    __file__ = __file__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"MeshRec has no {self.__name__}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Return a base for classes below the placeholder, whose objects cannot be made."""
        return (type(self.__name__, (), {"__init__": self.__call__}),)


class Helpers(MetaPathFinder, Loader):
    """Finds tests and their helpers in the checkout, where the bridge has none, and placeholders."""

    def __init__(self, checkout: Path, bridged: Iterable[str]) -> None:
        self.checkout = checkout
        self.bridged = set(bridged) - {"torchrec.test_utils"}  # the tests need more of this one

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if parts[0] not in ("torchrec", "fbgemm_gpu") or fullname in self.bridged:
            return None
        is_helper = any(
            part in ("tests", "test_utils", "linter") or part.startswith("test_") for part in parts[1:]
        )
        base = self.checkout.joinpath(*parts)
        if is_helper and base.with_suffix(".py").is_file():
            return spec_from_file_location(fullname, base.with_suffix(".py"))
        init = base / "__init__.py"
        if is_helper and init.is_file():
            return spec_from_file_location(fullname, init, submodule_search_locations=[str(base)])
        return ModuleSpec(fullname, None if is_helper and base.is_dir() else self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a placeholder."""
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


class Outcomes(unittest.TestResult):
    """The outcome of each test, with the error's last line."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.outcomes[test.id()] = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcomes[test.id()] = f"skipped: {reason}"

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.outcomes[test.id()] = f"{err[0].__name__}: {err[1]}"[:400] or "error"

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)


def main() -> int:
    """Run the tests, print the failures, and return whether there were any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=lambda text: Path(text).resolve())
    parser.add_argument("--original", action="store_true")
    parser.add_argument("--only", nargs="*", default=FOLDERS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.original:
        sys.path.insert(0, str(options.checkout))
    else:
        from meshrec.compat.bridge.names import MODULES
        from meshrec.compat.torchrec import install

        install(force=True)
        sys.meta_path.insert(0, Helpers(options.checkout, MODULES))
    outcomes: dict[str, str] = {}
    for file in sorted(options.checkout.glob("torchrec/**/tests/test_*.py")):
        parts = file.relative_to(options.checkout).with_suffix("").parts
        if parts[1] not in FOLDERS or not any(text in parts for text in options.only):
            continue
        module, result = ".".join(parts), Outcomes()
        try:
            unittest.defaultTestLoader.loadTestsFromName(module).run(result)
        except TypeError as error:  # a class of theirs below a placeholder
            result.outcomes[module] = f"TypeError: {error}"
        outcomes.update(result.outcomes)
        failures = {n: t for n, t in result.outcomes.items() if t and not t.startswith("skipped")}
        print(f"{len(result.outcomes) - len(failures):4} of {len(result.outcomes):4}  {module}", flush=True)
        for name, text in failures.items():
            print(f"      {name.removeprefix(module + '.')}: {text.splitlines()[0][:160]}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(outcomes, indent=1))
    passed = [name for name, text in outcomes.items() if not text]
    print(f"{len(passed)} of {len(outcomes)} passed")
    return int(len(passed) < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
