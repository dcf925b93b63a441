"""What is installed is used: `python .ci/installed.py README.md 0.2.0`, in an environment without extras.

README's blocks of code run and print what README says. `import remat` takes under 0.15 s of CPU time beyond
torch: the least of five fresh processes, for the first one writes byte code.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

LIMIT = 0.15
TIMED = """
import time, torch
start = time.process_time()
import remat
print(time.process_time() - start)
"""


def main(readme: str, version: str) -> None:
    import remat
    import remat.transforms.errors

    # Packages of this environment, not of a checkout.
    assert remat.__version__ == version and Path(remat.__file__).is_relative_to(sysconfig.get_path("purelib"))
    text = Path(readme).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n\nprints\n\n```text\n(.*?)```)?", text, re.DOTALL)
    for code, printed in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        assert out.getvalue() == printed, out.getvalue()
    took = min(float(subprocess.check_output([sys.executable, "-Wignore", "-c", TIMED])) for _ in range(5))
    print(
        f"  {len(blocks)} blocks of README run; import remat takes {took:.3f} s beyond torch, at most {LIMIT}"
    )
    assert took < LIMIT


if __name__ == "__main__":
    main(*sys.argv[1:])
