"""The web console: a chat page and a live view of the engine, served at ``/``.

Its files are read once and served from memory. They need no key, since a browser sends none with a
page; what they then ask for (`/v1/...`, `/console/metrics`) does.
"""

from pocket_client.gateway.console.pages import CONSOLE_PATHS, add_console

__all__ = ["CONSOLE_PATHS", "add_console"]
