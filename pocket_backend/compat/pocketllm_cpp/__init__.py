"""``import pocketllm_cpp``: the older name of ``pocket_cpp_core``."""

from pocket_cpp_core import *  # noqa: F403
