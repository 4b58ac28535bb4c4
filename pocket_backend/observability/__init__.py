"""What can be seen of a running engine, without what requests say.

| Module | Concept |
|---|---|
| ``names`` | every metric and span |
| ``histogram`` | a histogram that the engine thread can afford |
| ``logging`` | structured logs |
| ``health`` | health types and the watchdog |
| ``steps`` | recorded steps, in a ring |
| ``timeline`` | the life of each sequence, from recorded steps |
| ``chrome_trace`` | both in the Trace Event Format |
| ``tracing`` | OpenTelemetry spans, if asked for |

Imports nothing else of the package; everything may import it.
"""
