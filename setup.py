"""Builds the native tokenizer; everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("NPY_NUM_BUILD_JOBS", default=2).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "goal_kernels._native",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            cxx_std=17,
            extra_compile_args=["-O3", "-pthread", "-ffp-contract=off"],
            extra_link_args=["-pthread"],
        )
    ]
)
