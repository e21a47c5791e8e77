"""The engine rows: what each runs, and when it counts as done. Each engine is a `benchmarks.engine_process`.

Every vLLM engine is started with Quarry's own arguments, less the capture (plain), less the connector
(capture) or with vLLM's example connector in place of Quarry's, and is fed through the service's own bound on
what is in flight.
"""
