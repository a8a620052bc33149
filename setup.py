"""Builds wheels outside of the checkout, whose build/ would keep modules that are gone."""

import atexit
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build import build


class Build(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="cp_ring-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


setup(cmdclass={"build": Build})
