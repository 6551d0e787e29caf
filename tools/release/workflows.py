"""Check the workflows of GitHub for what makes a release unsafe: `python -m tools.release.workflows`.

zizmor reads them without a network, by the rules of .github/zizmor.yml.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.release.builds import ROOT

if __name__ == "__main__":
    github = ROOT / ".github"
    command = [
        Path(sys.executable).with_name("zizmor"),
        "--offline",
        "--config",
        github / "zizmor.yml",
        github,
    ]
    sys.exit(subprocess.run(command, check=False).returncode)
