"""``import dsv4_cpp_core``: the older name of ``pocket_cpp_core``."""

from pocket_cpp_core import *  # noqa: F403
