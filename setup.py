"""Builds libmeshrec, the C++ kernels, on libtorch's stable ABI (no Python ABI: one file for every Python)."""

import importlib.util
import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ISA_FLAGS = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "kernels_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mbmi2"]
    + ["-mprefer-vector-width=512"],
}
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that the binary serves


def torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        compiler = os.environ.get("CXX", "c++").split()[0]
        reason = None
        if os.environ.get("MESHREC_NO_KERNELS") == "1":
            reason = "MESHREC_NO_KERNELS=1 is set"
        elif shutil.which(compiler) is None:
            reason = f"no C++ compiler was found (looked for {compiler!r}; set CXX to choose another)"
        elif torch_folder() is None:
            reason = "torch is not installed in the build environment"
        if reason is not None:
            print(f"meshrec: C++ kernels are not built: {reason}; the plain torch kernels serve", file=sys.stderr)
            self.extensions = []
            return
        super().run()

    def build_extension(self, ext: Extension) -> None:
        torch = torch_folder()
        assert torch is not None
        cxx = os.environ.get("CXX", "c++").split()
        flags = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
        flags += ["-fno-math-errno", "-fno-trapping-math", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        flags += ["-isystem", str(torch / "include")]
        flags += ["-isystem", str(torch / "include/torch/csrc/api/include"), f"-I{ROOT / 'src/meshrec/ops'}"]
        flags += os.environ.get("CXXFLAGS", "").split()
        objects = Path(self.build_temp) / "meshrec"
        objects.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = [(source, objects / (Path(source).stem + ".o")) for source in ext.sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: self.compile([*cxx, *flags], *job), jobs))
        link = ["-shared", *(str(obj) for _, obj in jobs), "-o", str(target), f"-L{torch / 'lib'}", "-ltorch_cpu"]
        self.spawn([*cxx, *link, *os.environ.get("LDFLAGS", "").split()])


    def compile(self, command: list[str], source: str, target: Path) -> None:
        isa = ISA_FLAGS.get(target.stem, []) if platform.machine() in ("x86_64", "AMD64") else []
        self.spawn([*command, *isa, "-c", source, "-o", str(target)])


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "meshrec.libmeshrec",
            sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp")),
            depends=sorted(
                str(path.relative_to(ROOT))
                for path in [*(ROOT / "csrc").glob("*.[hi]*"), ROOT / "src/meshrec/ops/schemas.inc"]
            ),
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
