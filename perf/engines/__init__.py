"""One adapter per engine behind the ``Engine`` protocol of ``base.py``.

Ours (``pocketllm.py``) runs in the benchmark's process, or in a fresh one where memory and load
time are measured.  Every peer runs in a subprocess with the interpreter of its own virtual
environment (``environments.py``): ``subprocess_engine.py`` is the benchmark's side, ``worker.py``
the peer's, and ``*_worker.py`` hold what is particular to a peer.  Workers import the standard
library, ``perf.engines`` and their own packages only: a peer's numpy and Python need not be ours.
"""
