"""Executors: weights and KV storage behind ``BackendExecutor`` (``base``), built by ``registry``.

Backend modules are imported lazily; the native module only by ``cpp_engine``, torch only by
``torch_*``. May import ``api``, ``observability``, ``text``, ``sampling``, ``kv``, ``core``.
"""
