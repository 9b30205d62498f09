#!/usr/bin/env bash
# pyarrow 26.0.1: a listing with allow_not_found=True raises FileNotFoundError while another process creates
# the folder.
# Guess: an empty list, or the content of the new folder; nothing else is possible with allow_not_found.
# Seen: among 400,000 listings of a folder that another process creates and removes, some hundreds or thousands
# raise. The listing fails first, then a second look finds the folder, so the first error counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import subprocess
import sys

from pyarrow import fs

creating = "import os\nwhile True:\n os.mkdir('new')\n os.rmdir('new')"
creator = subprocess.Popen([sys.executable, "-c", creating])
files, selector = fs.LocalFileSystem(), fs.FileSelector("new", allow_not_found=True)
raised = 0
try:
    for _ in range(400_000):
        try:
            assert files.get_file_info(selector) == []
        except FileNotFoundError:
            raised += 1
finally:
    creator.kill()
    creator.wait()
print(raised, "of 400,000 listings raised FileNotFoundError")
assert raised > 0
PY
