"""Alias of the older API: see pocket_backend.compat."""

from pocket_backend import *  # noqa: F403
