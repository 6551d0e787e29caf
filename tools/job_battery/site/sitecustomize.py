"""Watches the commits of a process whose PYTHONPATH has this folder; see `tools.job_battery.commit_fault`."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

MODULE = "descant.core.atomic_file"


class AtomicFileFinder(importlib.abc.MetaPathFinder):
    """Changes one module after it is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        """The module's own spec, with a loader that runs `install` at its end."""
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            source = Path(__file__).parents[1] / "commit_fault.py"
            fault_spec = importlib.util.spec_from_file_location("commit_fault", source)
            fault = importlib.util.module_from_spec(fault_spec)
            fault_spec.loader.exec_module(fault)
            fault.install(module, os.environ["DESCANT_COMMIT_FAULT"])

        spec.loader.exec_module = exec_module
        return spec


if "DESCANT_COMMIT_FAULT" in os.environ:
    sys.meta_path.insert(0, AtomicFileFinder())
