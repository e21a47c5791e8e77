"""The front end, the planner, the worker and the publisher.

Imports torch and vLLM only where they run, never at start.
"""
