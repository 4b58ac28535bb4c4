"""The engine: one thread that turns requests into streams of tokens.

| Module | Concept |
|---|---|
| ``unified`` | ``UnifiedEngine``: the whole engine as one object |
| ``loop`` | ``EngineLoop``: the engine thread, its inbox, health, shutdown |
| ``stepper`` | ``EngineStepper``: one step of scheduler, executor and output stage; no threads |
| ``output`` | the output stage of one choice: text, usage, timings |
| ``streams`` | sinks: ``TokenStream``, ``ResultCollector`` |
| ``validation`` | checks before admission |
| ``stats`` | counters and gauges |
| ``recording`` | the step hook that fills a ring of recorded steps |
| ``tracing`` | requests as OpenTelemetry spans |
| ``build`` | executor and tokenizer from ``EngineArgs`` |
| ``llm``, ``async_llm`` | ``LLM`` and ``AsyncLLM`` for programs |

May import everything below it (docs/architecture.md), never ``triton``, ``cli`` or ``compat``.
"""
