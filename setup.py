"""Builds wheels outside of the checkout, whose build/ would keep modules that are gone."""

import atexit
import shutil
import sys
import tempfile

from setuptools import setup
from setuptools.command.build import build

# pip asks for the dependencies first, and would end with a list of Megatron's versions
if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(f"cp_ring: error: needs Python 3.12 or later; this is {sys.version.split()[0]}")


class Build(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="cp_ring-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


setup(cmdclass={"build": Build})
