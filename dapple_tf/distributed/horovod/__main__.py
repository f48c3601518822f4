"""Build Horovod for this environment, and then the native exchanges, which are optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    script = Path(__file__).with_name("install.sh")
    for command in (
        ["bash", str(script), sys.executable],
        [sys.executable, "-m", "dapple_tf.distributed.native.build"],
    ):
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.exit(code)
