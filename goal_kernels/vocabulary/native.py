"""The C++ extension, imported on first use: everything else in the package works without it."""

from __future__ import annotations


def native():
    """The module `goal_kernels._native`.

    Raises:
        ImportError: it has not been built here.
    """
    try:
        from goal_kernels import _native
    except ImportError as error:
        raise ImportError(
            f"the vocabulary needs the C++ extension goal_kernels._native, which does not import ({error}); build it "
            "with `pip install -e .`, or `python setup.py build_ext --inplace`, which needs pybind11 and a C++ compiler"
        ) from error
    return _native
