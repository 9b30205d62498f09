"""Builds libmeshrec, the C++ kernels, on libtorch's stable ABI (no Python ABI: one file for every Python).

Environment: ``CXX`` chooses the compiler, ``CXXFLAGS`` and ``LDFLAGS`` add to its flags, and
``MESHREC_NO_KERNELS=1`` installs without kernels, as happens where no compiler is found.
"""

import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
FORMULAS = ROOT / "src/meshrec/ops/tbe/formulas.py"
ISA_FLAGS = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "kernels_avx512": [
        *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mbmi2"],
        "-mprefer-vector-width=512",
    ],
}
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that the binary serves
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-parameter"]


def torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def why_no_kernels() -> str | None:
    if os.environ.get("MESHREC_NO_KERNELS") == "1":
        return "MESHREC_NO_KERNELS=1 is set"
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler was found (looked for {compiler()[0]!r}; set CXX to choose another)"
    if torch_folder() is None:
        return "torch is not installed in the build environment"
    return None


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        reason = why_no_kernels()
        if reason is not None:
            message = f"C++ kernels are not built: {reason}; the plain torch kernels serve"
            print(f"meshrec: {message}", file=sys.stderr)
            for ext in self.extensions:  # an earlier build's library must not be packed into this one's wheel
                (Path(self.build_lib) / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
            self.extensions = []
        super().run()

    def build_extension(self, ext: Extension) -> None:
        torch = torch_folder()
        assert torch is not None
        # Torch's headers are system headers: their warnings are not ours to mend.
        system = ["-isystem", str(torch / "include")]
        system += ["-isystem", str(torch / "include/torch/csrc/api/include")]
        flags = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", *WARNINGS, *system]
        flags += ["-fno-math-errno", "-fno-trapping-math"]
        flags += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'src/meshrec/ops'}", f"-I{self.write_formulas().parent}"]
        flags += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        objects = self.compile([*compiler(), *flags], ext)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        link = ["-shared", *map(str, objects), "-o", str(target), f"-L{torch / 'lib'}", "-ltorch_cpu"]
        self.spawn([*compiler(), *link, *shlex.split(os.environ.get("LDFLAGS", ""))])

    def write_formulas(self) -> Path:
        """Write ``formulas.inc``, the optimizers as Python lists them. An equal file is left alone."""
        target = Path(self.build_temp).absolute() / "meshrec" / "formulas.inc"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = runpy.run_path(str(FORMULAS))["as_cpp"]()
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
        return target

    def compile(self, command: list[str], ext: Extension) -> list[Path]:
        """Compile the sources that changed since their object, all of them when a header or the flags did."""
        folder = Path(self.build_temp) / "meshrec"
        folder.mkdir(parents=True, exist_ok=True)
        last_command = folder / "command.txt"
        if not last_command.exists() or last_command.read_text() != "\n".join(command):
            last_command.write_text("\n".join(command))
        written = [last_command, folder / "formulas.inc"]
        common = max(Path(path).stat().st_mtime for path in [*written, __file__, *ext.depends])

        def compile_one(source: str) -> Path:
            target = folder / f"{Path(source).stem}.o"
            if not target.exists() or target.stat().st_mtime <= max(common, Path(source).stat().st_mtime):
                isa = ISA_FLAGS.get(target.stem, []) if platform.machine() in ("x86_64", "AMD64") else []
                self.spawn([*command, *isa, "-c", source, "-o", str(target)])
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(compile_one, ext.sources))


class PlatformWheel(bdist_wheel):
    """The library binds to torch, not to Python: one wheel for every Python on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def files(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


setup(
    ext_modules=[
        Extension(
            "meshrec.libmeshrec",
            sources=files("csrc/*.cpp", "csrc/[!r]*/*.cpp"),
            depends=files("csrc/**/*.h", "csrc/**/*.inl", "src/meshrec/ops/schemas.inc"),
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
