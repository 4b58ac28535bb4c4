"""Replaying request traces through the real scheduler in virtual time.

| Module | Concept |
|---|---|
| ``trace`` | one request of a trace, and its JSON-lines file |
| ``synthetic`` | traces from stated distributions |
| ``cost`` | what a step takes: the model of an executor |
| ``fit`` | fitting that model to the real engine |
| ``replay`` | one server: trace -> scheduler -> virtual time -> outcome |
| ``summary`` | percentiles, goodput, records of the outcomes |
| ``picture`` | the plot; the only module that loads matplotlib |

Only ``fit`` needs an executor; everything else runs on integers, numpy and ``pocket_backend.core``.
"""
