"""Run code in a new process with environment variables of its own, forked from an interpreter that has
imported torch and MeshRec already: the import takes two seconds, and every test would wait for it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Reads a request per line, and answers with the exit code. The server itself starts no threads.
SERVER = """
import importlib, json, os, sys, traceback
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)

def main(code, arguments, folder, output, environment):
    os.environ.update(environment)
    for descriptor, path in zip((1, 2), output):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.path[0], sys.argv = folder, ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            main(*json.loads(line))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


# Read once, when torch or Triton is imported: a server for each of their values.
READ_BY_IMPORTS = {"OMP_NUM_THREADS", "TRITON_INTERPRET"}


class Interpreters:
    """One server for each environment that imports depend on.

    Not for tests of what an import does, of malloc's variables or of the end of an interpreter.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[tuple[str, str], ...], subprocess.Popen[str]] = {}

    def run(
        self, code: str, *arguments: object, cwd: Path | None = None, check: bool = True, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``code`` as ``python -c`` does, with ``environment`` in addition to the variables that are set.

        Raises:
            AssertionError: ``check`` is true, and the process failed. The message is its standard error.
        """
        server = self._server(environment)
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory(prefix="meshrec-code-") as folder:
            output = [f"{folder}/stdout", f"{folder}/stderr"]
            words = [str(each) for each in arguments]
            server.stdin.write(json.dumps([code, words, str(cwd or Path.cwd()), output, environment]) + "\n")
            server.stdin.flush()
            returncode = int(server.stdout.readline())
            out, error = (Path(path).read_text() for path in output)
        assert returncode == 0 or not check, error[-4000:]
        return subprocess.CompletedProcess([code, *words], returncode, out, error)

    def _server(self, environment: dict[str, str]) -> "subprocess.Popen[str]":
        key = tuple(sorted((name, value) for name, value in environment.items() if name in READ_BY_IMPORTS))
        if key not in self._servers:
            modules = ["torch", "meshrec.ops.operators", "meshrec.ops.tbe.naive"]
            self._servers[key] = subprocess.Popen(
                [sys.executable, "-c", SERVER, json.dumps(modules)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **dict(key)},
            )
        return self._servers[key]

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.close()
            server.wait()
            server.stdout.close()
        self._servers.clear()
